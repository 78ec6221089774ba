"""Run `qat.py` for segmentation models only, with the same verbs and options; a detection model is refused.

python segment/qat_seg.py quantize --weights gelan-c-seg.pt --data data/coco.yaml --name gelan_c_seg_qat
"""

import runpy
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in segment/

from utils.qat.core.command import run_command

if __name__ == '__main__':
    # by its path: with `patch_yolov9.sh --link`, `import qat` finds the launcher, which runs the command
    main = runpy.run_path(str(Path(__file__).resolve().parents[1] / 'qat.py'))['main']
    sys.exit(run_command(partial(main, only_task='segment')))
