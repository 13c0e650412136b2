"""Files on local disks and on Google Cloud Storage, by the same functions. Writes are atomic.

Paths are local, or `gs://bucket/name`. Importing this needs the standard library only: the manifest reader shares it.
Google's client is imported when the first `gs://` path is used. Every failure is an `OSError` with a clear message.
"""

from ._files import check_writable as check_writable
from ._files import exists as exists
from ._files import is_file as is_file
from ._files import is_folder as is_folder
from ._files import list_files as list_files
from ._files import make_folder as make_folder
from ._files import obstacle as obstacle
from ._files import open_input as open_input
from ._files import refuse_links as refuse_links
from ._files import remove_file as remove_file
from ._files import remove_folder as remove_folder
from ._files import remove_unfinished as remove_unfinished
from ._files import replacing as replacing
from ._files import size as size
from ._files import version as version
from ._files import why_no_file as why_no_file
from ._files import writing as writing
from ._google import CloudFile as CloudFile
from ._google import cache_folder as cache_folder
from ._google import cached_folder as cached_folder
from ._google import list_below as list_below
from ._google import stat as stat
from ._local import append_line as append_line
from ._local import staged as staged
from ._paths import StorageError as StorageError
from ._paths import absolute as absolute
from ._paths import base_name as base_name
from ._paths import is_cloud_path as is_cloud_path
from ._paths import joined as joined
from ._paths import parent as parent
