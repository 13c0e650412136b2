"""What this process has used: seconds of compilation, and memory."""

from calm_beam.decoding.compilation import CompileTime as CompileTime
from calm_beam.storage.free_memory import peak_bytes as peak_memory_bytes

__all__ = ["CompileTime", "peak_memory_bytes"]
