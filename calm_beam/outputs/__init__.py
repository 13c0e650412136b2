"""Decoded outputs as a data set: the request, its checks, the workers' assignment, and the stored files.

A sweep stores generations: the output of each prompt at every threshold. `calm-beam generate` stores answers, each by
one branch. Both write one Parquet file per shard, and a mark of success in the folder once all shards are there. The
losses of outputs, and the exact sums that tests use, are here too (`scoring`, `totals`). Decoding itself is in
`calm_beam.decoding` and `calm_beam.serving`; `calm_beam.transforms` spreads the work over workers.
"""

from .finished import COMPLETE as COMPLETE
from .finished import STOPPED as STOPPED
from .finished import FinishedAnswers as FinishedAnswers
from .finished import FinishedSettings as FinishedSettings
from .finished import FinishedSweep as FinishedSweep
from .job import AnswerJob as AnswerJob
from .job import DecodeJob as DecodeJob
from .job import OutputsError as OutputsError
from .job import SettingJob as SettingJob
from .job import StoredGenerations as StoredGenerations
from .rows import Generation as Generation
from .rows import Output as Output
from .rows import StoredPrompt as StoredPrompt
from .rows import read_answers as read_answers
from .rows import read_generations as read_generations
from .rows import stored_examples as stored_examples
from .rows import stored_failures as stored_failures
from .rows import stored_groups as stored_groups
from .rows import stored_prompts as stored_prompts
from .rows import write_generations as write_generations
from .shards import StoredShard as StoredShard
from .shards import open_shard as open_shard
from .shards import stored_shard as stored_shard
from .shards import whole_shard as whole_shard
