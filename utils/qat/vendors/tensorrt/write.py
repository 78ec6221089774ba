"""Model → MODEL.ep, MODEL.ts and MODEL-torch_tensorrt.engine, by Torch-TensorRT; see docs/tensorrt.md.

The interfaces are those of torch-tensorrt 2.10 to 2.14 (sources read: dynamo/_compiler.py, _compile.py). From 2.10 on its networks are
strongly typed by default, from 2.13 on always (TensorRT 11). So the types of the program are the precisions of the engine.
"""

import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from typing_extensions import override

from models.deploy.agreement import Reference, metadata_of
from models.deploy.formats.format import Export, Format, Written, size_of
from utils.qat.config.export import TORCH_TENSORRT_FILES
from utils.qat.core.command import command
from utils.qat.core.errors import QatError, refuse, reporting
from utils.qat.core.files import MADE_BY, atomic
from utils.qat.core.log import LOGGER
from utils.qat.vendors.load import open_file
from utils.qat.vendors.tensorrt.engine.api import load_tensorrt, product
from utils.qat.vendors.tensorrt.engine.sidecar import sidecar_of, write_entries
from utils.qat.vendors.tensorrt.quantize_op import quantize_op_program

FLAG = '--include torch_tensorrt'
OLDEST, NEWEST = (2, 10), (2, 14)  # torch-tensorrt; each needs the torch of its own number
MIB = 1 << 20


def how_to_get(torch_version: str) -> str:
    """Return the command that installs Torch-TensorRT for a torch, or with the nearest torch that has one."""
    own = tuple(map(int, torch_version.split('.')[:2]))
    oldest, fitting, newest = ('{}.{}'.format(*v) for v in (OLDEST, min(max(own, OLDEST), NEWEST), NEWEST))
    get = f"pip install 'torch-tensorrt=={fitting}.*' torchvision nvidia-modelopt huggingface_hub ninja"
    if OLDEST <= own <= NEWEST:
        return f'{get} (each torch has a torch-tensorrt of its own)'
    return f'Torch-TensorRT takes torch {oldest} to {newest}, and this is torch {torch_version}: {get} (brings torch {fitting})'


def load_torch_tensorrt(device: torch.device) -> ModuleType:
    """Import ModelOpt, then Torch-TensorRT, which registers its converter of quantize_op only in this order.

    Raises QatError if a package, the GPU or the CUDA compiler is missing, or Torch-TensorRT is older than OLDEST.
    """
    get = how_to_get(torch.__version__)
    missing = [name for name in ('torch_tensorrt', 'modelopt', 'huggingface_hub') if find_spec(name) is None]
    if missing:
        raise QatError(
            f'{FLAG}: no package {", ".join(missing)} here; {get}. Without it: --include onnx, then scripts/generate_trt_engine.sh'
        )
    if device.type != 'cuda':
        # import torch_tensorrt fails too: _utils.is_tegra_platform (2.14.0) asks the driver
        raise QatError(
            f'{FLAG}: its builder needs an NVIDIA GPU, and this is --device {device}; give a number: --device 0'
        )
    # both raise plain exceptions at import
    with reporting(f'{FLAG}: torch_tensorrt cannot be loaded here', Exception, remedy=get):
        import modelopt.torch.quantization  # noqa: F401  # defines tensorrt::quantize_op
        import torch_tensorrt
        from modelopt.torch.quantization.extensions import get_cuda_ext
    if tuple(map(int, torch_tensorrt.__version__.split('.')[:2])) < OLDEST:
        raise QatError(
            f'{FLAG}: Torch-TensorRT {torch_tensorrt.__version__} is installed; at least {".".join(map(str, OLDEST))} is needed: {get}'
        )
    if get_cuda_ext() is None:  # the constant folder calls the operator on each weight, though it keeps the node then
        raise QatError(
            f'{FLAG}: ModelOpt could not compile its CUDA kernel, which Torch-TensorRT calls on weights; it takes nvcc (CUDA toolkit) '
            'and ninja on the PATH'
        )
    return torch_tensorrt


def write_engine(path: Path, engine: bytes, built_by: str, check: Callable[[Path], None], **entries: object) -> None:
    """Write an engine and its sidecar of `entries`, if `check` of the temporary file raises nothing.

    built_by: name and version of the TensorRT that built it.
    """
    with atomic(path) as tmp:
        sidecar = sidecar_of(tmp)
        try:
            tmp.write_bytes(engine)
            write_entries(tmp, built_by, **entries)
            check(tmp)
            sidecar.replace(sidecar_of(path))
        finally:
            sidecar.unlink(missing_ok=True)


def compile_settings(
    tt: ModuleType, device: torch.device, smallest: Sequence[int], largest: Sequence[int], workspace: int, path: Path
) -> dict[str, object]:
    """Return the arguments that both compilers of Torch-TensorRT (`tt`) take.

    `smallest` and `largest` are shapes of the images; the kernels are chosen for the largest. `workspace` is in MiB. The timing cache lies beside `path`,
    MODEL.ep, so that the second build reuses the timings of the first.
    """
    shapes = {'min_shape': smallest, 'opt_shape': largest, 'max_shape': largest}
    return {
        'arg_inputs': [
            tt.Input(shape=largest, dtype=torch.float32)
            if smallest == largest
            else tt.Input(**shapes, dtype=torch.float32, name='images')
        ],
        'device': device,
        'workspace_size': workspace * MIB,
        'timing_cache_path': str(path.with_name(f'{path.stem}-torch_tensorrt.timing.cache').absolute()),
    }


class TorchTensorRTFormat(Format):
    """MODEL.ep, MODEL.ts and MODEL-torch_tensorrt.engine. They are run when they are compiled, and not again."""

    name = 'torch_tensorrt'

    @override
    def require(self, export: Export) -> None:
        config = export.config
        alone = list(config.files) == [self.name]
        refuse(
            [
                (
                    config.dynamic and config.batch_size == 1,
                    f'--dynamic: with {FLAG} the batch is 1 to --batch-size; give that, such as --batch-size 8',
                ),
                (
                    config.verify and alone,
                    f'--verify: not with {FLAG} alone, whose files are compared with PyTorch as they are compiled; '
                    'val_trt.py evaluates the engine',
                ),
                (
                    config.half and alone,
                    f'--half: {FLAG} takes --dtype instead, which is fp16 by default; leave it out',
                ),
            ]
        )
        load_torch_tensorrt(export.predict.device)
        export.target.require_tensorrt(FLAG, export.zero_points)

    @override
    def paths(self, export: Export, path: Path) -> list[Path]:
        files = [path.with_name(path.stem + TORCH_TENSORRT_FILES[kind]) for kind in export.config.formats]
        return files + [sidecar_of(file) for file in files if file.suffix == '.engine']

    @override
    @torch.no_grad()
    def write(self, export: Export, path: Path) -> Written:
        LOGGER.info('compiling with Torch-TensorRT: some minutes')
        config, model, device = export.config, export.predict.model, export.predict.device
        tt, imgsz, batch = load_torch_tensorrt(device), config.imgsz, config.batch_size
        program = quantize_op_program(model, imgsz, batch, config.dynamic, config.dtype == 'fp16')
        reference, typing = Reference(model, batch, imgsz), config.dtype.upper()
        images = reference.images
        smallest, largest = (1 if config.dynamic else batch, 3, *imgsz), (batch, 3, *imgsz)
        settings = compile_settings(tt, device, smallest, largest, config.workspace, path)
        files = dict(zip(config.formats, self.paths(export, path)))
        written: dict[Path, str] = {}

        def agree(file: Path, computed: object) -> None:
            engine = f'Torch-TensorRT ({file.name})'
            written[file] = str(reference.require_agreement(computed, engine, typing))

        problem = f'{FLAG}: Torch-TensorRT {tt.__version__} did not take the model'
        remedy = 'no file was written by that step. --include onnx takes another way to TensorRT'
        with reporting(problem, RuntimeError, AssertionError, ValueError, remedy=remedy, most=300):
            if {'ep', 'ts'} & set(files):
                whole = config.require_full_compilation
                compiled = tt.dynamo.compile(program, require_full_compilation=whole, min_block_size=1, **settings)
            for kind in sorted({'ep', 'ts'} & set(files)):
                with atomic(files[kind]) as tmp:
                    how = 'exported_program' if kind == 'ep' else 'torchscript'
                    # an example, of which the batch axis stays open; torch.jit.trace takes tensors alone
                    example = settings['arg_inputs'] if kind == 'ep' else [images]
                    tt.save(compiled, str(tmp), output_format=how, arg_inputs=example)
                    with zipfile.ZipFile(tmp, 'a') as archive:
                        archive.comment = MADE_BY.encode()
                    loaded = tt.load(str(tmp))
                    agree(files[kind], (loaded.module() if kind == 'ep' else loaded)(images))
            if 'engine' in files:
                # the whole program is one engine; its inputs have the names of forward, its outputs are output0, output1
                engine = bytes(tt.dynamo.convert_exported_program_to_serialized_trt_engine(program, **settings))
                metadata = metadata_of(model, export.kept_float, export.target.name)
                write_engine(
                    files['engine'],
                    engine,
                    product(load_tensorrt()),
                    lambda tmp: agree(files['engine'], open_file(tmp, device, 'tensorrt')(images)),
                    weights=path.with_suffix('.pt').name,
                    precision=f'{"INT8 and " * export.int8}{typing}',
                    typed=True,
                    inputs={'images': {'min': smallest, 'opt': largest, 'max': largest}},
                    metadata={key: str(value) for key, value in metadata.items()},
                    workspace_mib=config.workspace,
                    level=None,
                    torch_tensorrt=tt.__version__,
                )
        takes = f'batch {"of 1 to " * config.dynamic}{batch}'
        return Written(
            files,
            [f'-> {file}, {size_of(file)}, {takes}; against PyTorch: {agreed}' for file, agreed in written.items()],
        )

    @override
    def next_commands(self, export: Export, written: Written, data: str) -> list[str]:
        engine = written.files.get('engine')
        return [command('val_trt.py', '--engine-file', engine, '--data', data)] if engine else []


FORMAT = TorchTensorRTFormat()
