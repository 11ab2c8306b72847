"""Which precision each accelerator supports: the table, its rows by device, a policy's check."""

from mpjax._hardware.check import Finding as Finding
from mpjax._hardware.check import SupportReport as SupportReport
from mpjax._hardware.check import check_policy as check_policy
from mpjax._hardware.check import examine as examine
from mpjax._hardware.find import DeviceLike as DeviceLike
from mpjax._hardware.find import find_accelerator as find_accelerator
from mpjax._hardware.table import DTYPES as DTYPES
from mpjax._hardware.table import SUPPORT as SUPPORT
from mpjax._hardware.table import Accelerator as Accelerator
