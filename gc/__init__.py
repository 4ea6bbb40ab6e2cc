"""What may be deleted, deleting it, auditing what is there, and what it all costs.

`sweep` collects, `removal` takes names and images away, `audit` checks, `capacity` tells sizes.
Import from these modules: a command loads only what it runs.
"""
