"""Remotes, peers, the node daemon. Empty until the first of them is built."""
