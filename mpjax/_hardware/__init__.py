"""The table of dtypes that each accelerator supports, and the check of a policy against it."""

from mpjax._hardware.check import DtypeFinding as DtypeFinding
from mpjax._hardware.check import SupportReport as SupportReport
from mpjax._hardware.check import check_policy as check_policy
from mpjax._hardware.check import examine as examine
from mpjax._hardware.find import DeviceLike as DeviceLike
from mpjax._hardware.find import find_accelerator as find_accelerator
from mpjax._hardware.table import DTYPES as DTYPES
from mpjax._hardware.table import SUPPORT as SUPPORT
from mpjax._hardware.table import Accelerator as Accelerator
