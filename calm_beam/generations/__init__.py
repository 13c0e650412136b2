"""Generations as they are stored: a Parquet file a shard, and the folder that makes them complete."""

from .folder import COMPLETE as COMPLETE
from .folder import JOB as JOB
from .folder import STOPPED as STOPPED
from .folder import DecodeJob as DecodeJob
from .folder import FinishedSweep as FinishedSweep
from .folder import StoredGenerations as StoredGenerations
from .folder import check_files as check_files
from .folder import check_one_engine as check_one_engine
from .folder import shard_digest as shard_digest
from .folder import shard_files as shard_files
from .folder import shard_path as shard_path
from .shards import Generation as Generation
from .shards import GenerationsError as GenerationsError
from .shards import Output as Output
from .shards import StoredShard as StoredShard
from .shards import open_shard as open_shard
from .shards import read_generations as read_generations
from .shards import stored_examples as stored_examples
from .shards import stored_failures as stored_failures
from .shards import stored_groups as stored_groups
from .shards import stored_prompts as stored_prompts
from .shards import stored_shard as stored_shard
from .shards import whole_shard as whole_shard
from .shards import write_generations as write_generations
