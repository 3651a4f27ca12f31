"""`python -m batchtp` is `batchtp`."""

from batchtp.cli import main

if __name__ == "__main__":
    main()
