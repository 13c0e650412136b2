"""Folders that Hugging Face's transformers saves: `config.json` with a `model_type`, and safetensors."""

from .folder import is_hugging_face as is_hugging_face
from .folder import read_hugging_face as read_hugging_face
from .written import write_hugging_face as write_hugging_face
