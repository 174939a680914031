"""`python -m driftlens`: the command line, for an interpreter whose scripts are not on the path."""

from driftlens.cli import main

if __name__ == "__main__":
    main()
