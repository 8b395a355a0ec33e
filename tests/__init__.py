"""The tests: real servers on real ports, the real default model, tiny models made on the spot for everything else."""
