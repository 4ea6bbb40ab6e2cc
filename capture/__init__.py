"""Everything that touches checkpoints as CRIU and container engines write them: in and out.

For now directories and archives come in (`add_checkpoint`) and directories go out
(`export_image`).
"""

from icefloe.capture.export import ExportResult, export_image
from icefloe.capture.ingest import AddResult, IngestOptions, add_checkpoint, open_checkpoint

__all__ = [
    "AddResult",
    "ExportResult",
    "IngestOptions",
    "add_checkpoint",
    "export_image",
    "open_checkpoint",
]
