"""Parts of yolov9-qat that do not define an nn.Module."""

__version__ = '0.1.0'  # the same as VERSION beside patch_yolov9.sh; a test compares them
