"""`python -m service serve` is `attend serve`."""

from service.cli import main

main()
