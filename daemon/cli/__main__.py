"""`python -m taktd.daemon.cli`: the same as `taktctl`."""

from taktd.daemon.cli import main

main()
