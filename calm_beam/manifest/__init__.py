"""The manifest: what a calibration run promises, for which model, in one JSON file.

Standard library only, so that a serving process can read a manifest without numpy, JAX or Beam. The form of the file
is described for other languages by `manifest.schema.json` beside this module; the rules which tie values to each
other are enforced by the records. Files of the first version, `calm-beam/manifest/v1`, are read as they are: those of
thresholds have no `kind`, those of settings are of kind `settings`, and no entry has a `rule`.
"""

from calm_beam.errors import ManifestError as ManifestError
from calm_beam.inputs.vocabularies.record import ChatRecord as ChatRecord
from calm_beam.inputs.vocabularies.record import VocabularyRecord as VocabularyRecord
from calm_beam.storage.digest import content_digest as content_digest

from ._choice import ANY_ENTRY as ANY_ENTRY
from ._choice import EntryChoice as EntryChoice
from ._choice import EntryWords as EntryWords
from ._data import MOST_FAILED_IDS as MOST_FAILED_IDS
from ._data import MOST_SAMPLED_IDS as MOST_SAMPLED_IDS
from ._data import SERVED_DECODERS as SERVED_DECODERS
from ._data import ConfirmationRecord as ConfirmationRecord
from ._data import DataRecord as DataRecord
from ._data import GroupRecord as GroupRecord
from ._data import SettingDataRecord as SettingDataRecord
from ._data import SettingGroup as SettingGroup
from ._data import SettingRecord as SettingRecord
from ._data import UnseenRecord as UnseenRecord
from ._entries import Calibration as Calibration
from ._entries import Look as Look
from ._entries import PathEntry as PathEntry
from ._entries import SettingCalibration as SettingCalibration
from ._entries import SettingLook as SettingLook
from ._entries import SettingStep as SettingStep
from ._guarantee import GUARANTEE as GUARANTEE
from ._guarantee import SETTINGS as SETTINGS
from ._guarantee import THRESHOLDS as THRESHOLDS
from ._guarantee import guarantee_in_words as guarantee_in_words
from ._manifest import SCHEMA as SCHEMA
from ._manifest import SCHEMAS as SCHEMAS
from ._manifest import Manifest as Manifest
from ._manifest import SettingManifest as SettingManifest
from ._manifest import about_settings as about_settings
from ._model import ENGINES as ENGINES
from ._model import LOOP as LOOP
from ._model import VARIANT_MEASURES as VARIANT_MEASURES
from ._model import DecodeRecord as DecodeRecord
from ._model import EngineRecord as EngineRecord
from ._model import ExitRuleRecord as ExitRuleRecord
from ._model import ModelRecord as ModelRecord
from ._model import Variant as Variant
from ._model import engine_difference as engine_difference
from ._model import threshold_in_words as threshold_in_words
from ._plan import CONFIRM_PATH as CONFIRM_PATH
from ._plan import COUNT_NEAR_TIES as COUNT_NEAR_TIES
from ._plan import NEAR_TIES as NEAR_TIES
from ._plan import WORST_NEAR_TIES as WORST_NEAR_TIES
from ._plan import EarlierPlan as EarlierPlan
from ._plan import ParetoPlan as ParetoPlan
from ._plan import Plan as Plan
from ._plan import SettingPlan as SettingPlan
from ._rounds import EarlierEnd as EarlierEnd
from ._rounds import SequentialPlan as SequentialPlan
from ._rounds import SequentialRecord as SequentialRecord
from ._rounds import SettingSequentialPlan as SettingSequentialPlan
from ._rounds import WatchedPlan as WatchedPlan
from ._rounds import looks_by_round as looks_by_round
from ._sentences import clusters_in_words as clusters_in_words
from ._sentences import confirmation_in_words as confirmation_in_words
from ._sentences import confirming_in_words as confirming_in_words
from ._sentences import engine_in_words as engine_in_words
from ._sentences import near_ties_in_words as near_ties_in_words
from ._sentences import ordinal as ordinal
from ._sentences import p_value_beside as p_value_beside
from ._sentences import plans_in_words as plans_in_words
from ._sentences import repeats_in_words as repeats_in_words
from ._sentences import rounds_in_words as rounds_in_words
from ._sentences import served_in_words as served_in_words
from ._sentences import unseen_in_words as unseen_in_words
from ._tests import CONSISTENCIES as CONSISTENCIES
from ._tests import EACH_VARIANT as EACH_VARIANT
from ._tests import LOSSES as LOSSES
from ._tests import LOSSES_OF as LOSSES_OF
from ._tests import OF_VARIANTS as OF_VARIANTS
from ._tests import PARETO as PARETO
from ._tests import PROCEDURES as PROCEDURES
from ._tests import SETTING_LOSSES as SETTING_LOSSES
from ._tests import AskedTest as AskedTest
from ._tests import Objective as Objective
from ._tests import PlannedTest as PlannedTest
from ._tests import SettingTest as SettingTest
from .reader import parse_manifest as parse_manifest
from .reader import read_any_manifest as read_any_manifest
from .reader import read_manifest as read_manifest
from .reader import read_setting_manifest as read_setting_manifest
from .writer import MANIFEST as MANIFEST
from .writer import lost_race as lost_race
from .writer import manifest_text as manifest_text
from .writer import time_of_now as time_of_now
from .writer import write_manifest as write_manifest
