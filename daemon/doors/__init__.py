"""The supervisor's sockets: who may come in, what is said there."""
