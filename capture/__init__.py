"""Everything that touches checkpoints as CRIU and container engines write them: in and out.

`ingest` stores a directory (`tree`) or an archive (`archive`), `export` writes one back. Import
from these modules: a command loads only what it runs.
"""
