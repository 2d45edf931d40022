"""The operators that `import torchvision` needs, where its wheel does not fit this build of torch.

The wheels of torchvision are built for CUDA. Their extension does not load beside a CPU build of torch, and the import
fails with "operator torchvision::nms does not exist". timm, lightning and transformers import torchvision if it is
installed. Declaring the operators is enough for them; nothing here calls them.

Import this file before those libraries, in tests and in the scripts of tests/integrations/workers.
"""

import importlib.util
from pathlib import Path

import torch

MISSING = ("nms", "qnms")
ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def extension_loads(place: Path) -> bool:
    """Whether torchvision can bring its own operators."""
    try:
        torch.ops.load_library(place / "_C.so")
    except OSError:
        return False
    return True


found = importlib.util.find_spec("torchvision")
library = None
if found is not None and found.origin is not None and not extension_loads(Path(found.origin).parent):
    library = torch.library.Library("torchvision", "DEF")  # the operators last as long as this does
    for name in MISSING:
        library.define(name + ARGUMENTS)
