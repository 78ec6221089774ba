"""PyTorch's own: programs of torch.export, packages of AOTInductor, and checkpoints as they are. They take the placement of any target."""

from utils.qat.vendors.vendor import Backend, FileKind, Vendor

FILES = ('.pt2',)

VENDOR = Vendor(
    backends={
        'pt2': Backend('torch.export', f'{__name__}.pt2', FILES, FILES),
        'aoti': Backend('AOTInductor', f'{__name__}.aoti', FILES, FILES, native=True),
        # for an .onnx file the checkpoint from which it was exported
        'pytorch': Backend('PyTorch', f'{__name__}.eager', (), ('.pt', '.pth', '.onnx')),
    },
    formats={
        'pt2': FileKind('.pt2', f'{__name__}.write_pt2'),
        'aoti': FileKind('-aoti.pt2', f'{__name__}.write_aoti'),
    },
)
