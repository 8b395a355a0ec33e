"""One file per dialect. A route parses, asks and answers; it holds no logic of its own."""
