"""The manifest: what a calibration run promises, for which model, in one JSON file.

Standard library only, so that a serving process can read a manifest without numpy, JAX or Beam. The form of the file
is described for other languages by `manifest.schema.json` beside this module; the rules which tie values to each
other are enforced by the records.
"""

from ._checks import ManifestError as ManifestError
from ._external import EXTERNAL_LOSSES as EXTERNAL_LOSSES
from ._external import MOST_SAMPLED_IDS as MOST_SAMPLED_IDS
from ._external import ExternalCalibration as ExternalCalibration
from ._external import ExternalDataRecord as ExternalDataRecord
from ._external import ExternalGroup as ExternalGroup
from ._external import ExternalManifest as ExternalManifest
from ._external import ExternalPlan as ExternalPlan
from ._external import ExternalStep as ExternalStep
from ._external import ExternalTest as ExternalTest
from ._external import SettingRecord as SettingRecord
from ._external import external_guarantee as external_guarantee
from ._external_rounds import EXTERNAL_ENDS as EXTERNAL_ENDS
from ._external_rounds import ExternalEnd as ExternalEnd
from ._external_rounds import ExternalLook as ExternalLook
from ._external_rounds import ExternalSequentialPlan as ExternalSequentialPlan
from ._external_rounds import ExternalSequentialRecord as ExternalSequentialRecord
from ._external_rounds import external_end as external_end
from ._manifest import EXTERNAL as EXTERNAL
from ._manifest import GUARANTEE as GUARANTEE
from ._manifest import Manifest as Manifest
from ._manifest import check_kind as check_kind
from ._manifest import guarantee_in_words as guarantee_in_words
from ._manifest import no_group as no_group
from ._plan import ParetoPlan as ParetoPlan
from ._plan import PlannedTest as PlannedTest
from ._plan import PlanRecord as PlanRecord
from ._plan import SequentialPlan as SequentialPlan
from ._record import SCHEMA as SCHEMA
from ._rounds import external_rounds_in_words as external_rounds_in_words
from ._rounds import rounds_in_words as rounds_in_words
from .digest import content_digest as content_digest
from .reader import parse_manifest as parse_manifest
from .reader import read_any_manifest as read_any_manifest
from .reader import read_external_manifest as read_external_manifest
from .reader import read_manifest as read_manifest
from .records import CONSISTENCIES as CONSISTENCIES
from .records import ENDS as ENDS
from .records import LOSSES as LOSSES
from .records import MOST_FAILED_IDS as MOST_FAILED_IDS
from .records import PARETO as PARETO
from .records import PROCEDURES as PROCEDURES
from .records import Calibration as Calibration
from .records import ChatRecord as ChatRecord
from .records import DataRecord as DataRecord
from .records import DecodeRecord as DecodeRecord
from .records import EarlierEnd as EarlierEnd
from .records import GroupRecord as GroupRecord
from .records import Look as Look
from .records import ModelRecord as ModelRecord
from .records import PathEntry as PathEntry
from .records import SequentialRecord as SequentialRecord
from .records import Variant as Variant
from .records import VocabularyRecord as VocabularyRecord
from .writer import MANIFEST as MANIFEST
from .writer import lost_race as lost_race
from .writer import manifest_text as manifest_text
from .writer import write_manifest as write_manifest
