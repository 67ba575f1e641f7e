"""`python -m visard`: the command line."""

from visard.cli import main

main()
