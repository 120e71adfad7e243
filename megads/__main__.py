"""`python -m megads`, the command `megads`, such as for `python -m pdb -m megads train ...`."""

from megads.cli.main import main

if __name__ == "__main__":
    main()
