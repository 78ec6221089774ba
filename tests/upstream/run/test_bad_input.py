"""Bad input: each command answers in one line, with the file or flag and what is allowed, exits with code 2, and writes nothing."""

import shlex
import shutil

import numpy as np
import onnx
import pytest
import torch
import yaml
from conftest import REPO
from helpers import classifiers
from helpers.faults import archive
from helpers.graphs import graph_of
from helpers.segmenters import segmenter
from helpers.zoo import config_file, program

from models.deploy.formats.onnx_end2end import export_end2end
from utils.qat.config.export import Nms
from utils.qat.core.command import run_command
from utils.qat.vendors.load import open_file

SIZE = 64
CASES = """
qat.py quantize --weights {single} --hyp {hyp} --data {data} --imgsz 64 --workers 0 --device cpu
    --weights {wrong}/none.pt          | --weights; no such file
    --weights {wrong}                  | --weights; not a file
    --weights {wrong}/text.pt          | text.pt; not a PyTorch checkpoint; copy it again
    --weights {wrong}/empty.pt         | empty.pt; not a PyTorch checkpoint (or cut short): empty; copy it again
    --weights {wrong}/older.pt         | write it again; if that fails, it is cut: copy it again
    --weights {wrong}/dict.pt          | dict.pt; no YOLOv9 model
    --weights {wrong}/state.pt         | has weights without their network; upstream train.py
    --weights {wrong}/module.pt        | upstream train.py
    --weights {wrong}/suffix.onnx      | ending in .pt or .pth
    --weights {wrong}/foreign.pt       | another yolov9-qat tool; qat.py quantize
    --weights {quantized}              | already quantized; qat.py eval
    --data {wrong}/none.yaml           | --data; no such file
    --data {wrong}/not_yaml.yaml       | not valid YAML
    --data {wrong}/list.yaml           | train:; names:
    --data {wrong}/no_train.yaml       | train: missing
    --data {wrong}/no_names.yaml       | names: missing
    --data {wrong}/classes.yaml        | 2 classes; the model has 10
    --data {wrong}/nc.yaml             | nc: 3; 10 names
    --data {wrong}/missing.yaml        | val:; does not exist; correct it
    --data {wrong}/empty.yaml          | val:; no images
    --data {wrong}/coordinates.yaml    | 00003.txt:1; coordinates in 0..1
    --data {wrong}/text.yaml           | 00003.txt:1; class x y width height
    --data {wrong}/class.yaml          | 00003.txt; class 10; 0..9
    --data {wrong}/list.yaml --hyp {wrong}/none.yaml | --hyp; no such file
    --hyp {wrong}/hyp.yaml             | --hyp; hsv_h; missing
    --iters 0                          | --iters 0; 1 or more; --epochs 0
    --iters many                       | --iters; 'many'
    --val-split 0.01                   | --val-split 0.01; 12 images, of which 0
    --val-split 0.1 --epochs 0         | --val-split 0.1; --epochs 0
    --percentile 99                    | --percentile 99: only with --calib-method percentile
    --device 7                         | --device 7; --device cpu
    --device gpu                       | --device gpu; 'cpu'
    --device mps                       | --device mps: not available here; use --device cpu
    --project {single}                 | single.pt
    --imgsz 641                        | --imgsz 641:; multiples of 32; 640 or 672
    --imgsz 128 96                     | --hyp; augmented images are squares; one number for --imgsz
    --keep-float 1                     | needs --sensitive
    --max-drop 1                       | needs --sensitive
    --activation relu --keep-float 1   | needs --sensitive
    --sensitive x.json                 | say what to do with it
    --sensitive x.json --max-drop 0.2  | x.json: no such file
    --exclude model.99                 | matches no quantized layer
    --activation polynomial --target onnxruntime                 | ONNX Runtime computes it no faster
    --activation relu6                                           | computes it no faster than a ReLU; use relu
    --activation-only model.0          | needs --activation
    --activation relu --activation-only model.77                | matches no activation function to exchange
    --data ''                          | --data: must not be empty
    --name ''                          | --name: must not be empty
    --target edge --activation relu6 --keep-float 1             | leaves layers in float
    --weights resnet9 --dry-run        | no network of torchvision
qat.py quantize --imgsz 64 --device cpu
                                       | required: --weights
    --weights {single} --data {classes}                         | a folder, and the model is no classifier
    --weights {classifier} --data {classes} --hyp {hyp}         | images of a classifier are not augmented
qat.py sensitive --weights {quantized} --data {data} --device cpu
                                       | is already quantized
qat.py eval --weights {quantized} --data {data} --imgsz 64 --workers 0 --device cpu
    --weights {single} {wrong}/none.pt | none.pt; no such file
    --weights {single} {single} --exist-ok                      | single.pt; leave --exist-ok out
    --weights {wrong}/broken.onnx      | broken.onnx; no valid ONNX file
    --weights {wrong}/plugin.onnx      | EfficientNMS_TRT; TensorRT alone; --include onnx_end2end --nms standard
    --weights {files}/int8.onnx --imgsz 640                     | --imgsz 640; 64 x 64
    --weights {classifier}             | labels of boxes are for detectors
    --baseline none.pt                 | --baseline; no such file
    --baseline {segmenter}             | --baseline; a segmentation model, unlike; give the model that
    --baseline {files}/float.onnx --imgsz 96                    | --imgsz 96; float.onnx; takes 64 x 64
    --imgsz 100 128                    | --imgsz 100 128:; 96 128 or 128
    --overlap                          | --overlap; only for a segmentation model
    --mask-downsample-ratio 2          | --mask-ratio; only for a segmentation model
val_trt.py --weights {files}/int8.onnx --device cpu --data {data} --imgsz 64 --workers 0
    --weights {single}                 | single.pt; .engine or .onnx
    --weights {wrong}/model.engine     | model.engine; ONNX Runtime evaluates the .onnx
    --weights {wrong}/model.engine --backend rtx                | model.engine
    --weights {files}/a.onnx           | a classifier
    --backend tensorrt                 | --backend tensorrt: TensorRT does not run .onnx files
    --backend rtx                      | give onnxruntime or openvino
export_qat.py --weights {quantized} --imgsz 64
    --opset 9                          | --opset 9; 13
    --imgsz 100                        | --imgsz 100:; multiples of 32; 96 or 128
    --imgsz 64 100                     | --imgsz 64 100; 64 96 or 64 128
    --include pt2 --half               | --half: not with --include pt2
    --include onnx pt2 --half          | --trt 11
    --include aoti --half --device cpu | --half
    --include litert --dynamic         | --dynamic: not with --include litert
    --include openvino_end2end --nms plugin                     | OpenVINO takes --nms standard
    --backend openvino                 | --backend: only with --verify
    --verify-images 3 --max-ap-diff 1  | --verify-images, --max-ap-diff: only with --verify
    --nms plugin --topk-all 10         | --topk-all, --nms: only with --include onnx_end2end
    --include onnx_end2end --nms plugin --iou-thres 0           | --iou-thres 0; EfficientNMS_TRT; --nms standard
    --include onnx_end2end --nms plugin --topk-all 4097         | --topk-all 4097; 1 to 4096; --nms plugin
    --include onnx_end2end --topk-all 3841                      | --topk-all 3841; 1 to 3840; --nms standard
    --include onnx_end2end --topk-all 0                         | --topk-all 0
    --include onnx_end2end --topk-all 85 --class-agnostic       | --topk-all 85; only 84 candidates
    --include onnx_end2end --nms plugin --verify {data} | --verify; EfficientNMS_TRT; --include onnx onnx_end2end; --nms standard
    --include onnx_end2end --mask-resolution 28 --sampling-ratio 1 | --mask-resolution, --sampling-ratio: only for a segmentation model
    --workspace 3                      | --workspace: only with --include torch_tensorrt
    --include pt2 --trt 8 --simplify   | --trt, --simplify: only with --include onnx or onnx_end2end or openvino or openvino_end2end
    --weights {segmenter} --include onnx_end2end --nms plugin   | --nms plugin: EfficientNMS_TRT does not tell
    --weights {segmenter} --include onnx_end2end --nms plugin --trt 11 | --nms plugin:; a segmentation model takes --nms standard
    --weights {segmenter} --include onnx_end2end --opset 15     | --opset 15: masks take RoiAlign of opset 16
    --weights {segmenter} --include onnx_end2end --pooler-scale 0.5 | --pooler-scale 0.5: must be one of 0.25
    --weights {classifier} --include openvino_end2end           | NMS is for detectors
    --weights {classifier} --include onnx_end2end --topk-all 10 | --topk-all: only for detectors
    --verify {wrong}/none.yaml         | --verify; no such file
    --verify {wrong}/classes.yaml      | --verify; 2 classes; the model has 10
export_yoloV9.py -w {single}
    -s 100                             | --size 100: must be multiples of 32, the stride of the model, such as 96 or 128
    --dynamic --batch 4                | --dynamic, --batch 4: give one of the two
    --opset 12                         | --opset 12: must lie in 13 to 20 for --trt 10
    --trt 8 --opset 18                 | --opset 18: must lie in 13 to 17 for --trt 8
    -w missing.pt                      | --weights missing.pt: no such file
    -w {classifier}                    | reads detections only
reparameterization.py --save {out}/saved.pt --weights {dual}
    --weights {single}                 | has one branch; DDetect; go on with: python qat.py quantize --weights
    --weights {quantized}              | already quantized
    --weights {out}/none.pt            | none.pt: no such file
    --classes_num 80                   | --classes_num 80; 10 classes
    --save {dual}                      | --save; choose another
    --save {out}/out.onnx              | --save; out.onnx; pt
    --cfg {out}/none.yaml              | --cfg; none.yaml: no such file
    --cfg {demo_yaml}                  | --cfg; yolov9-demo.yaml; another model
    --model x                          | --model; t; s; m; c; e
    --weights {classifier} --fold-pools | --fold-pools: the model has no AConv; go on with: python qat.py quantize
scripts/audit_onnx.py {files}/a.onnx
    --json {files}/a.onnx              | --json; a.onnx: expected the name of a file ending in .json
    --json ''                          | --json: must not be empty
compare_outputs.py --device cpu --batch-size 2
    {files}/a.onnx {files}/b.onnx      | --data, --random; one of the two
    {files}/a.onnx {files}/b.onnx --random 1 --backend onnxruntime,openvino,pt2 | give one, or one for each of the 2 models
    {files}/a.onnx {files}/b.onnx --random 1 --backend pt2      | runs .pt2 files, and neither
    {files}/a.onnx {files}/b.onnx --data {data} --seed 3        | --seed 3: only with --random
    {files}/a.onnx {files}/none.onnx --random 1                 | B; none.onnx; no such file
    {files}/a.onnx {files}/b.onnx --random 1 --imgsz 32         | --imgsz 32; 64
    {files}/a.onnx {files}/b.onnx --data {wrong}/empty          | --data; one folder of images for each class
    {files}/a.onnx {files}/b.onnx --data {some}                 | --data; 1 folders (n01, ...); 3 outputs; --classes
    {files}/a.onnx {files}/b.onnx --random 1 --std 0 1 1        | --std
    {files}/a.onnx {single} --random 1                          | one is a detector; classifier
    {single} {segmenter} --random 1    | one is a detector and the other a segmentation model
    {classifier} {classifier} --data {data}                     | takes a folder with train/ and val/
    {single} {single} --data {classes} | takes a data YAML
benchmark_trt.py --device cpu
    {files}/a.onnx --backend onnxruntime --level 3 --jobs 2     | --level, --jobs: only for engines, by --backend tensorrt or rtx
    no.onnx                            | MODEL no.onnx: no such file
    {files}/float.onnx --precision int8                         | has no Q/DQ
    {files}/int8.onnx --precision fp32,fp16                     | --precision fp32,fp16: ; is INT8
    {files}/float.onnx --precision bf16 --backend onnxruntime   | BF16 is measured in OpenVINO only
    {files}/float.onnx --precision fp16 --backend onnxruntime   | Runtime computes in the types of the file
    {files}/float.pt --precision fp16  | FP16 is for GPUs
    {files}/float.onnx --backend tensorrt | TensorRT: needs an NVIDIA GPU
    {files}/int8.onnx --backend openvino --precision fp32       | give the float model for FP32
    {files}/float.pt --backend onnxruntime | ONNX Runtime does not run .pt
    {files}/net.onnx --imgsz 64 --backend pytorch               | there is no net.pt beside it
    {files}/net.onnx                   | --imgsz: ; leaves the image size of x open
    {files}/float.onnx --imgsz 96      | --imgsz 96 96: ; takes 64 x 64
    {files}/float.pt --imgsz 100000    | --imgsz 100000: ; each at most 8192
    {files}/float.pt --imgsz 100       | must be multiples of 32
    {files}/half.onnx --batch 8        | fixed batch of 1
    {files}/float.onnx --baseline none.onnx | --baseline none.onnx: no such file
    {files}/float.onnx --data none.yaml | --data none.yaml: no such file
    {files}/float.onnx --batch 1,two   | --batch 1,two: must be numbers
    {files}/float.onnx --batch 0       | --batch 0: must be numbers
    {files}/float.onnx --warmup 5min   | --warmup 5min: must be a time such as 500ms
    {files}/float.onnx --warmup -1     | --warmup
    {wrong}/broken.onnx                | no valid ONNX file
    {wrong}/notes.txt                  | expected a file ending in .onnx or .engine or .xml
    {classifier} --data {data}         | takes a folder with train/ and val/
    {single} --data {classes}          | takes a data YAML
scripts/infer_onnx.py --device cpu
    missing.onnx {images}              | MODEL missing.onnx: no such file
    {images} {images}                  | MODEL
    {files}/float.onnx missing         | missing: no image, nor a folder with images
    {files}/float.onnx {data}          | no image, nor a folder with images
    {wrong}/plugin.onnx {images}       | its NMS is EfficientNMS_TRT, which TensorRT alone has
scripts/draw_engine.py
    --layer {out}/none.json            | none.json; no such file
    --layer {wrong}                    | not a file
                                       | --layer
scripts/coco_to_yolo.py
    {wrong}/list.json {images}         | no COCO JSON
    {wrong}/nothing.json {images}      | annotations is missing
    {wrong}/unnamed.json {images}      | images[0].file_name is missing
    {wrong}/elsewhere.json {images}    | none of the 1 images
    {wrong}/twice.json {images}        | have the same id
    {wrong}/strange.json {images}      | annotations[0] is of an image or of a category
scripts/voc_to_yolo.py
    {wrong}/none {images}              | ANNOTATIONS; no such folder
    {wrong}/empty {images}             | none of its 12 images has one of the 0 XML files
    {wrong}/unclosed {images}          | a.xml: no XML of PASCAL VOC
    {wrong}/entities {images}          | a.xml: has a document type
    {wrong}/boxless {images}           | a.xml: object 0 has no bndbox
    {wrong}/words {images}             | a.xml: object 0: the corners of its bndbox
    {wrong}/voc {images} --names cat   | a.xml: 'dog' is no class of --names cat
    {wrong}/voc {images}               | none of its 12 images has one of the 1 XML files
demo/make_data.py --out {out}/data
    --task pose                        | --task: invalid choice: 'pose'
    --train 0                          | --train: '0' is not a whole number
    --size big                         | --size
    --out {wrong}                      | choose another folder
scripts/verify_tensorrt.py --weights {quantized} --float {single} --data {data}
    --segment {quantized}              | give both or none
    --segment none.pt --segment-data d | no such file
"""


def cases(text):
    """(command line, parts of its answer) of each indented line of a table: the line above it that is not, and its own words."""
    for line in filter(None, text.splitlines()):
        if line[0] != ' ':
            base = line
        else:
            words, says = line.rsplit(' | ', 1)
            yield f'{base} {words.strip()}'.strip(), says.strip().split('; ')


@pytest.fixture(scope='module')
def wrong(small, tmp_path_factory):
    """A folder of wrong files."""
    folder = tmp_path_factory.mktemp('wrong')
    good = yaml.safe_load(small.data.read_text())
    (folder / 'empty').mkdir()
    changes = {
        'no_train': {'train': None},
        'no_names': {'names': None},
        'classes': {'names': ['a', 'b'], 'nc': 2},
        'nc': {'nc': 3},
        'missing': {'val': 'images/nowhere'},
        'empty': {'val': str(folder / 'empty')},
    }
    labels = {'coordinates': '1 0.5 0.5 1.5 0.1', 'class': '10 0.5 0.5 0.1 0.1', 'text': 'one 0.5 0.5 0.1 0.1'}
    for name, line in labels.items():
        shutil.copytree(small.data.parent, folder / name, ignore=shutil.ignore_patterns('*.cache'))
        (folder / name / 'labels/val/00003.txt').write_text(line + '\n')
        changes[name] = {'path': str(folder / name)}
    for name, change in changes.items():
        content = {key: value for key, value in {**good, **change}.items() if value is not None}
        (folder / f'{name}.yaml').write_text(yaml.safe_dump(content))
    texts = {'not_yaml.yaml': 'train: [\n', 'list.yaml': '- 1\n', 'hyp.yaml': 'mosaic: 1.0\n'}
    for name in ('text.pt', 'broken.onnx', 'model.engine', 'notes.txt'):
        texts[name] = 'not what its name says'
    elsewhere = '{"id": 1, "file_name": "x.jpg", "width": 9, "height": 9}'
    box = '{"image_id": 2, "category_id": 1, "bbox": [1, 1, 2, 2]}'
    for name, images, boxes in (
        ('unnamed', '{"id": 1}', ''),
        ('elsewhere', elsewhere, ''),
        ('twice', f'{elsewhere}, {elsewhere}', ''),
        ('strange', elsewhere, box),
    ):
        texts[f'{name}.json'] = f'{{"images": [{images}], "annotations": [{boxes}], "categories": []}}'
    texts |= {'list.json': '[]', 'nothing.json': '{"images": [], "categories": []}'}
    dog = '<annotation><object><name>dog</name><bndbox><xmin>{}</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>'
    voc = {
        'voc': dog.format(1),
        'words': dog.format('one'),
        'unclosed': dog[:-3],
        'boxless': dog.replace('bndbox', 'polygon'),
    }
    voc['entities'] = f'<!DOCTYPE a [<!ENTITY b "c">]>{dog.format("&b;")}'
    for name, text in voc.items():
        (folder / name).mkdir()
        texts[f'{name}/a.xml'] = text
    for name, text in texts.items():
        (folder / name).write_text(text)
    torch.save({'a': 1}, folder / 'dict.pt')
    torch.save({'a': 1}, folder / 'older.pt', _use_new_zipfile_serialization=False)
    (folder / 'empty.pt').touch()
    torch.save({'model': small.float_model().state_dict()}, folder / 'state.pt')
    torch.save({'model': torch.nn.Conv2d(3, 3, 1)}, folder / 'module.pt')
    shutil.copy(small.single, folder / 'suffix.onnx')
    pickled = b'cpytorch_quantization.nn.modules.quant_conv\nQuantConv2d\n.'  # as in the other tool's checkpoints
    (folder / 'foreign.pt').write_bytes(archive({'foreign/data.pkl': pickled}))
    return folder


@pytest.fixture(scope='module')
def files(exports, tmp_path_factory):
    """The exports, and classifiers: a and b, net of open image size."""
    folder = shutil.copytree(exports, tmp_path_factory.mktemp('files') / 'exports')
    for name, side in (('a', SIZE), ('b', SIZE), ('net', 'side')):
        text = 'p = GlobalAveragePool(x) f = Flatten(p) y = Mul(f, factor)'
        factor = {'factor': np.float32([1, 1, 2])}
        graph = graph_of(text, shape=('n', 3, side, side), returns=('n', 3), initializers=factor)
        onnx.save(graph, folder / f'{name}.onnx')
    return folder


@pytest.fixture(scope='module')
def given(small, files, wrong, tmp_path_factory):
    """Values of the {names} in CASES, but for {out}."""
    folder = tmp_path_factory.mktemp('others')
    export_end2end(files / 'int8.onnx', wrong / 'plugin.onnx', Nms('plugin'))
    torch.save({'model': segmenter(), 'ema': None}, folder / 'segmenter.pt')
    classifiers.save(classifiers.build('resnet18'), folder / 'classifier.pt')
    classifiers.write_images(folder / 'classes', train=2, val=1)
    shutil.copytree(folder / 'classes/val/class 0', folder / 'some/n01')
    return {
        **vars(small),
        **{name: folder / f'{name}.pt' for name in ('segmenter', 'classifier')},
        **{name: folder / name for name in ('classes', 'some')},
        'hyp': REPO / 'demo/hyp.yaml',
        'images': small.data.parent / 'images/val',
        'files': files,
        'wrong': wrong,
        'demo_yaml': config_file('demo'),
    }


def written(*folders):
    """When each file of these folders was written; but for caches, which are ours."""
    return {p: p.stat().st_mtime_ns for f in folders for p in f.rglob('*') if p.is_file() and p.suffix != '.cache'}


EACH = list(cases(CASES))


@pytest.mark.parametrize('line, says', EACH, ids=[line.replace('{', '').replace('}', '') for line, _ in EACH])
def test_bad_input_is_one_line_and_exit_code_2(given, tmp_path, capsys, monkeypatch, line, says):
    monkeypatch.chdir(tmp_path)
    file, *words = [word.format(**given, out=tmp_path) for word in shlex.split(line)]
    inputs = given['single'].parent, given['files'], given['wrong'], given['segmenter'].parent
    before = written(*inputs)
    assert run_command(program(file).main, words) == 2
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    if 'openvino' in line and 'no package openvino' in last:
        pytest.skip('no OpenVINO')
    assert said.count(': error: ') == 1 and ': error: ' in last and 'Traceback' not in said, said
    assert [text for text in says if text not in last] == [], last
    assert written(*inputs) == before and not list(tmp_path.iterdir()), (
        'nothing is written before the input was checked'
    )


def test_onnx_runtime_reads_the_files_that_are_right(given):
    assert [open_file(given['files'] / f'{name}.onnx').nc for name in ('float', 'int8', 'half')] == [10] * 3
