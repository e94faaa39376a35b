"""Import of files that other systems wrote."""

from topr_trl.importing.formats import FORMATS as FORMATS
