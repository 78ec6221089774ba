"""Laws of export_yoloV9.py: the plain export plus nodes that change its output to DeepStream-Yolo's layout."""

import configparser
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
import torch
from helpers.faults import sampled
from helpers.graphs import copy, dims, metadata, model_of, run_onnx
from helpers.zoo import program
from onnx import TensorProto

from models.deploy.formats.deepstream import deepstream_config, deepstream_layout
from models.deploy.formats.onnx import export_onnx
from models.deploy.formats.onnx_end2end import torch_masks, torch_nms
from models.quantize.checkpoint import CheckpointFile
from utils.qat.config.export import Nms, Pooling
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.graph import onnx_graph
from utils.qat.vendors.load import open_file

export_yolov9 = program('export_yoloV9.py').main


def decoded(plain):
    """output0 [B, 4 + nc, N] → [B, N, 6], in NumPy."""
    rows = plain.transpose(0, 2, 1).astype(np.float64)
    centre, size, scores = rows[..., :2], rows[..., 2:4], rows[..., 4:]
    return np.concatenate(
        (centre - size / 2, centre + size / 2, scores.max(2, keepdims=True), scores.argmax(2)[..., None]), 2
    )


def images_of(number, height, width):
    return torch.rand(number, 3, height, width, generator=torch.Generator().manual_seed(number)).numpy()


# ---- the graph ----------------------------------------------------------------------------------------------------------

WIDE = {'imgsz': (64, 96), 'dynamic': True, 'simplify': True}
EXPORTS = {
    'static': ('float', {}),
    'wide and dynamic': ('float', WIDE),
    'FP16, high': ('float', {'imgsz': (96, 64), 'half': True, 'opset': 19}),
    'INT8, batch of 2': ('quantized', {'batch': 2, 'opset': 13}),
    'INT8, wide and dynamic': ('quantized', WIDE),
    'INT8 and FP16, dynamic': ('quantized', {'half': True, 'opset': 20, 'dynamic': True}),
}


@pytest.mark.parametrize('kind, options', sampled(EXPORTS.values(), 3), ids=EXPORTS)
def test_it_is_the_plain_export_in_another_layout(small, tmp_path, kind, options):
    model = small.float_model() if kind == 'float' else small.quantized_model()
    options = {'imgsz': (64, 64), **options}
    export_onnx(model, tmp_path / 'plain.onnx', **options)
    done = export_onnx(model, tmp_path / 'deepstream.onnx', **options, layout=deepstream_layout)
    plain, graph = onnx.load(tmp_path / 'plain.onnx'), onnx.load(tmp_path / 'deepstream.onnx')

    (height, width), first = options['imgsz'], 'batch' if options.get('dynamic') else options.get('batch', 1)
    [given], [returned] = graph.graph.input, graph.graph.output
    anchors = sum(height * width // stride**2 for stride in (8, 16, 32))
    assert (given.name, dims(given)) == ('input', [first, 3, height, width])
    assert (returned.name, dims(returned)) == ('output', [first, anchors, 6])
    assert returned.type.tensor_type.elem_type == given.type.tensor_type.elem_type == TensorProto.FLOAT

    # node by node the same, names included, up to output0; behind it FP32
    types = {
        v.name: v.type.tensor_type.elem_type
        for v in onnx.shape_inference.infer_shapes(graph, strict_mode=True, data_prop=True).graph.value_info
    }
    assert {types[name] for n in graph.graph.node[len(plain.graph.node) : -1] for name in n.output} == {
        TensorProto.FLOAT,
        TensorProto.INT64,
    }
    before = [n for n in graph.graph.node if not n.name.startswith('/deepstream/')]
    for node in before:
        node.input[:] = ['images' if name == 'input' else name for name in node.input]
    assert before == list(plain.graph.node) and done.qdq == onnx_graph.count_qdq(plain)
    assert metadata(graph) == metadata(plain)

    for number in (1, 3) if options.get('dynamic') else (options.get('batch', 1),):
        images = images_of(number, height, width)
        [theirs] = run_onnx(tmp_path / 'plain.onnx', {'images': images})
        [ours] = run_onnx(tmp_path / 'deepstream.onnx', {'input': images})
        wanted = decoded(theirs)
        assert ours.shape == wanted.shape == (number, anchors, 6)
        assert np.abs(ours[..., :5] - wanted[..., :5]).max() < 1e-4
        # the class of the highest score; of equal scores any
        assert np.array_equal(np.take_along_axis(theirs[:, 4:], ours[:, None, :, 5].astype(int), 1)[:, 0], ours[..., 4])
        assert len(np.unique(ours[..., 5])) > 1


@pytest.mark.parametrize('opset', [13, 17, 18, 23])
@pytest.mark.parametrize('nc', [1, 3])
def test_boxes_in_numbers(opset, nc):
    axes = ['batch', 4 + nc, 2]
    plain = model_of('output0 = Identity(images)', {'images': axes}, {'output0': axes}, opset=opset)
    graph = deepstream_layout(copy(plain))
    onnx.checker.check_model(graph, full_check=True)
    rows = np.float32([[100, 50, 20, 10, *[0.2, 0.7, 0.1][:nc]], [5000.25, 6, 2, 4, *[0.3, 0.1, 0.9][:nc]]])
    best = [[0.2, 0], [0.3, 0]] if nc == 1 else [[0.7, 1], [0.9, 2]]
    wanted = np.hstack(([[90, 45, 110, 55], [4999.25, 4, 5001.25, 8]], best)).astype(np.float32)
    [ours] = run_onnx(graph, {'input': np.stack((rows.T, rows[::-1].T))})
    assert np.array_equal(ours, np.stack((wanted, wanted[::-1])))


def test_it_is_not_taken_for_a_plain_file(small, tmp_path):
    export_onnx(small.float_model(), tmp_path / 'model.onnx', (64, 64), layout=deepstream_layout)
    with pytest.raises(QatError, match='has the outputs of export_yoloV9.py.*export_qat.py'):
        open_file(tmp_path / 'model.onnx')


# ---- the configuration --------------------------------------------------------------------------------------------------


def settings_of(text):
    parser = configparser.ConfigParser()
    parser.read_string(text)
    return parser['property'], parser['class-attrs-all']


@pytest.mark.parametrize('builds, says', [(True, 'built at the first start'), (False, 'DeepStream cannot build it')])
def test_the_configuration_says_who_builds_the_engine(builds, says):
    assert says in deepstream_config('m.pt.onnx', 7, builds=builds)


@pytest.mark.parametrize('int8, mode, precision', [(True, '1', 'int8'), (False, '2', 'fp16')])
def test_configuration(int8, mode, precision):
    settings, classes = settings_of(deepstream_config('m.pt.onnx', 7, batch=4, int8=int8))
    wanted = {
        'network-mode': mode,
        'model-engine-file': f'model_b4_gpu0_{precision}.engine',
        'onnx-file': 'm.pt.onnx',
        'labelfile-path': 'labels.txt',
        'num-detected-classes': '7',
        'batch-size': '4',
        'model-color-format': '0',
        'maintain-aspect-ratio': '1',
        'symmetric-padding': '1',
        'cluster-mode': '2',
        'parse-bbox-func-name': 'NvDsInferParseYolo',
        'engine-create-func-name': 'NvDsInferYoloCudaEngineGet',
        'custom-lib-path': 'nvdsinfer_custom_impl_Yolo/libnvdsinfer_custom_impl_Yolo.so',
    }
    assert {name: settings[name] for name in wanted} == wanted
    assert 'int8-calib-file' not in settings, 'the scales are in the file'
    assert float(settings['net-scale-factor']) == pytest.approx(1 / 255)
    assert dict(classes) == {'nms-iou-threshold': '0.45', 'pre-cluster-threshold': '0.25', 'topk': '300'}


# ---- the command --------------------------------------------------------------------------------------------------------


COMMANDS = {  # checkpoint → flags, what is said, and network-mode
    'dual': (
        ['-s', '64', '96', '--dynamic', '--simplify'],
        ['DualDDetect -> DDetect in memory', '[batch, 3, 64, 96]', 'opset 17'],
        '2',
    ),
    'single': (['-s', '64', '--batch', '2'], ['float', '[2, 3, 64, 64]'], '2'),
    'quantized': (
        ['--trt', '11'],
        ['INT8', 'opset 19', 'FP16', '[1, 3, 128, 128]'],
        '1',
    ),  # the size of its calibration
}


@pytest.mark.parametrize('kind', COMMANDS)
def test_the_command(small, tmp_path, monkeypatch, capsys, kind):
    """Files have the names that DeepStream-Yolo's own script gives them, and lie beside the checkpoint."""
    (arguments, says, mode), weights, here = COMMANDS[kind], tmp_path / 'models/yolov9 é.pt', tmp_path / 'models'
    here.mkdir()
    weights.write_bytes(getattr(small, kind).read_bytes())
    monkeypatch.chdir(tmp_path)
    assert run_command(export_yolov9, ['--weights' if kind == 'quantized' else '-w', str(weights), *arguments]) == 0
    said = capsys.readouterr().out
    assert [text for text in (*says, 'head DDetect\n') if text not in said] == []
    made = {'yolov9 é.pt.onnx', 'labels.txt', 'config_infer_primary_yoloV9.txt'}
    assert {p.name for p in here.iterdir()} == {weights.name, *made} and [*tmp_path.iterdir()] == [here]
    assert (here / 'labels.txt').read_text(encoding='utf-8') == ''.join(f'{digit}\n' for digit in range(10))
    settings, _ = settings_of((here / 'config_infer_primary_yoloV9.txt').read_text(encoding='utf-8'))
    graph = onnx.load(f'{weights}.onnx')
    first = dims(graph.graph.input[0])[0]
    wanted = ['yolov9 é.pt.onnx', mode, '10', '1' if first == 'batch' else str(first)]
    assert [settings[k] for k in ('onnx-file', 'network-mode', 'num-detected-classes', 'batch-size')] == wanted
    assert any(onnx_graph.count_qdq(graph)) == (mode == '1')


def test_with_a_project_all_files_are_there(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(small.single.parent.iterdir())
    assert run_command(export_yolov9, ['-w', str(small.single), '-s', '64', '--project', 'a/b']) == 0
    made = {f'{small.single.name}.onnx', 'labels.txt', 'config_infer_primary_yoloV9.txt'}
    assert {p.name for p in Path('a/b').iterdir()} == made and set(small.single.parent.iterdir()) == before


def test_dynamic_with_a_batch_of_1_is_what_it_was(small, tmp_path, monkeypatch):
    """DeepStream-Yolo's script allows these two options together."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'm.pt').write_bytes(small.single.read_bytes())
    assert run_command(export_yolov9, ['-w', 'm.pt', '-s', '64', '--dynamic', '--batch', '1']) == 0
    assert dims(onnx.load('m.pt.onnx').graph.input[0])[0] == 'batch'


def test_masks_in_the_layout_of_its_other_parser(demo_seg, tmp_path, monkeypatch):
    """The four outputs, by their order; detections and masks are those of NMS in PyTorch."""
    (tmp_path / 'seg.pt').write_bytes(demo_seg.quantized.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert run_command(export_yolov9, ['-w', 'seg.pt', '-s', '160', '--dynamic', '--simplify']) == 0
    settings, classes = settings_of((tmp_path / 'config_infer_primary_yoloV9_seg.txt').read_text())
    assert settings['parse-bbox-instance-mask-func-name'] == 'NvDsInferParseYoloSeg' and settings['cluster-mode'] == '4'
    assert settings['network-type'] == '3' and settings['output-instance-mask'] == '1' and classes['topk'] == '100'
    graph = onnx.load('seg.pt.onnx').graph
    assert [(o.name, dims(o)[1:]) for o in graph.output] == [
        ('boxes', [100, 4]),
        ('scores', [100, 1]),
        ('classes', [100, 1]),
        ('masks', [100, 160, 160]),
    ]
    assert {o.type.tensor_type.elem_type for o in graph.output} == {TensorProto.FLOAT}
    export_onnx(
        CheckpointFile('seg.pt').load_any()[0], tmp_path / 'plain.onnx', (160, 160), dynamic=True, simplify=True
    )
    images = np.stack(
        [cv2.resize(cv2.imread(str(f)), (160, 160)) for f in sorted(demo_seg.data.parent.glob('images/val/*'))[:2]]
    )
    images = np.ascontiguousarray(images[..., ::-1].transpose(0, 3, 1, 2), np.float32) / 255
    plain = tuple(map(torch.from_numpy, run_onnx(tmp_path / 'plain.onnx', {'images': images})))
    boxes, scores, classes, masks = run_onnx(tmp_path / 'seg.pt.onnx', {'input': images})
    wanted = torch_nms(plain[0], Nms('standard'), plain[1].shape[1])
    shapes = torch_masks(wanted, plain[1], Pooling())
    assert sum(map(len, wanted)) > 4
    for i, (rows, of_rows) in enumerate(zip(wanted, shapes)):
        n = len(rows)
        found = np.concatenate((boxes[i], scores[i], classes[i]), 1)
        assert np.abs(found[:n] - rows[:, :6].numpy()).max() < 1e-3 and not found[n:].any() and not masks[i, n:].any()
        assert np.abs(masks[i, :n].reshape(n, -1) - of_rows.numpy()).max() < 1e-3
