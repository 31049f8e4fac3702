"""`python -m ferroflow_dask`: the command line, where scripts are not on the path."""

from ferroflow_dask.cli import main

if __name__ == "__main__":
    main()
