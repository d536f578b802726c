"""``python -m kvinterp``: the command line where no script is installed."""

from kvinterp.cli import main

if __name__ == "__main__":
    main()
