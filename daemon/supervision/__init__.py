"""Devices, their executors and their lanes, and the gateway: started, told what to serve, watched."""
