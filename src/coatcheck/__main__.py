"""`python -m coatcheck`: the command line."""

from coatcheck.cli import main

main(prog_name="coatcheck")
