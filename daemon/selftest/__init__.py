"""`taktctl selftest`: what a GPU and taktd's use of it do on this machine, measured and written down to be sent."""
