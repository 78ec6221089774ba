"""A stand-in for the Python interface of TensorRT 10.13, for tests of scripts/verify_tensorrt.py. It is not TensorRT.

Its engine is the ONNX file. ONNX Runtime computes it on the CPU, on memory of the GPU if there is one. It records the names that are asked
of it in the file $STAND_IN_RECORD; the test compares them with tests/data/tensorrt_api.json. A name that is not here is an AttributeError.
$STAND_IN_CRASH is part of the name of a file whose build ends the process, as a fault of TensorRT can.
"""

import enum
import hashlib
import json
import os
import signal
import time

import onnx

__version__ = '10.13.3+stand-in'
MAGIC = b'stand-in, not TensorRT\n'
TYPES = {1: 'FLOAT', 6: 'INT32', 7: 'INT64', 10: 'HALF'}  # of ONNX


def note(line):
    if 'STAND_IN_RECORD' in os.environ:
        with open(os.environ['STAND_IN_RECORD'], 'a') as file:
            file.write(f'{line}\n')


class Recorded:
    """An object whose public attributes are recorded when they are asked for."""

    def __getattribute__(self, name):
        if not name.startswith('_') and not name.startswith('own_'):
            note(f'{type(self).__name__}.{name}')
        return object.__getattribute__(self, name)


class Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    Severity = Severity


class IProgressMonitor:
    pass


class IProfiler:
    pass


NetworkDefinitionCreationFlag = enum.IntEnum(
    'NetworkDefinitionCreationFlag', {'EXPLICIT_BATCH': 0, 'STRONGLY_TYPED': 1}
)
BuilderFlag = enum.IntEnum('BuilderFlag', {'FP16': 0, 'INT8': 1})
MemoryPoolType = enum.IntEnum('MemoryPoolType', {'WORKSPACE': 0})
ProfilingVerbosity = enum.IntEnum('ProfilingVerbosity', {'DETAILED': 2})
TensorIOMode = enum.IntEnum('TensorIOMode', {'NONE': 0, 'INPUT': 1, 'OUTPUT': 2})
LayerInformationFormat = enum.IntEnum('LayerInformationFormat', {'ONELINE': 0, 'JSON': 1})


def init_libnvinfer_plugins(log, namespace):
    return True


class INetworkDefinition(Recorded):
    own_model = None


class ParserError(Recorded):
    def __init__(self, node):
        self.own_node = node

    def desc(self):
        return 'Plugin not found, are the plugin name, version, and namespace correct?'

    def node_name(self):
        return self.own_node.name

    def node_operator(self):
        return self.own_node.op_type

    def node(self):
        return 0


class OnnxParser(Recorded):
    def __init__(self, network, log):
        self.own_network, self.own_errors = network, []

    def parse_from_file(self, path):
        model = onnx.load(path)
        self.own_errors = [ParserError(node) for node in model.graph.node if node.op_type == 'EfficientNMS_TRT']
        self.own_network.own_model, self.own_network.own_path = model, path
        return not self.own_errors

    @property
    def num_errors(self):
        return len(self.own_errors)

    def get_error(self, index):
        return self.own_errors[index]


class ITimingCache(Recorded):
    def __init__(self, content):
        self.own_known = json.loads(content or b'[]')

    def serialize(self):
        return json.dumps(self.own_known).encode()


class IOptimizationProfile(Recorded):
    def __init__(self):
        self.own_shapes = {}

    def set_shape(self, name, *shapes):
        self.own_shapes[name] = shapes


class IBuilderConfig(Recorded):
    profiling_verbosity = builder_optimization_level = progress_monitor = None

    def __init__(self):
        self.own_profile, self.own_cache = IOptimizationProfile(), ITimingCache(b'')

    def set_memory_pool_limit(self, pool, size):
        assert pool == MemoryPoolType.WORKSPACE and size > 0

    def set_flag(self, flag):
        assert flag in BuilderFlag

    def add_optimization_profile(self, profile):
        self.own_profile = profile

    def create_timing_cache(self, content):
        return ITimingCache(content)

    def set_timing_cache(self, cache, ignore_mismatch):
        self.own_cache = cache
        return True

    def get_timing_cache(self):
        return self.own_cache


class Builder(Recorded):
    def __init__(self, log):
        self.own_log = log

    def create_network(self, flags):
        assert flags & 1, 'TensorRT 8.6 needs EXPLICIT_BATCH'
        return INetworkDefinition()

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, settings):
        crash = os.environ.get('STAND_IN_CRASH')
        if crash and crash in network.own_path:
            os.kill(os.getpid(), signal.SIGSEGV)
        content = network.own_model.SerializeToString()
        known = hashlib.sha256(content).hexdigest()
        if known not in settings.own_cache.own_known:  # so that a build with timings is the faster one
            time.sleep(2)
            settings.own_cache.own_known.append(known)
        header = json.dumps({'profile': settings.own_profile.own_shapes, 'bytes': len(content)}).encode()
        return MAGIC + header + b'\n' + content


class Runtime(Recorded):
    def __init__(self, log):
        self.own_log = log

    def deserialize_cuda_engine(self, content):
        magic, header, model = (*content.split(b'\n', 2), b'', b'')[:3]
        if magic + b'\n' != MAGIC or len(model) != json.loads(header)['bytes']:
            self.own_log.log(Severity.ERROR, 'Error Code 1: Serialization (stand-in: the engine is not whole)')
            return None
        return ICudaEngine(onnx.load_from_string(model), json.loads(header)['profile'])


class ICudaEngine(Recorded):
    def __init__(self, model, profile):
        self.own_model, self.own_profile = model, profile
        weights = {w.name for w in model.graph.initializer}
        self.own_tensors = {t.name: t for t in (*model.graph.input, *model.graph.output) if t.name not in weights}
        self.own_inputs = [t.name for t in model.graph.input if t.name not in weights]

    @property
    def num_io_tensors(self):
        return len(self.own_tensors)

    @property
    def num_layers(self):
        return len(self.own_model.graph.node)

    def get_tensor_name(self, index):
        return list(self.own_tensors)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.own_inputs else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name):
        return tuple(d.dim_value or -1 for d in self.own_tensors[name].type.tensor_type.shape.dim)

    def get_tensor_profile_shape(self, name, profile):
        return self.own_profile[name]

    def get_tensor_dtype(self, name):
        class DataType:
            name_ = TYPES[self.own_tensors[name].type.tensor_type.elem_type]

        DataType.name = DataType.name_
        return DataType

    def create_execution_context(self):
        return IExecutionContext(self)

    def create_engine_inspector(self):
        return EngineInspector(self)


class EngineInspector(Recorded):
    def __init__(self, engine):
        self.own_engine = engine

    def get_engine_information(self, layout):
        assert layout == LayerInformationFormat.JSON

        def tensors(names):
            return [{'Name': n, 'Dimensions': [1], 'Format/Datatype': 'Row major linear FP32'} for n in names if n]

        nodes = self.own_engine.own_model.graph.node
        layers = [
            {
                'Name': node.name,
                'LayerType': node.op_type,
                'Inputs': tensors(node.input),
                'Outputs': tensors(node.output),
                'Metadata': '',
            }
            for node in nodes
        ]
        return json.dumps({'Layers': layers, 'Bindings': list(self.own_engine.own_tensors)})


class IExecutionContext(Recorded):
    profiler = None

    def __init__(self, engine):
        from utils.qat.backends.onnxruntime import onnx_session

        self.own_engine, self.own_shapes, self.own_addresses = engine, {}, {}
        self.own_session = onnx_session(engine.own_model.SerializeToString())

    def set_input_shape(self, name, shape):
        self.own_shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name):
        own = self.own_engine.get_tensor_shape(name)
        batch = next(iter(self.own_shapes.values()), own)[0]
        return self.own_shapes.get(name) or tuple(batch if n == -1 else n for n in own)

    def set_tensor_address(self, name, address):
        self.own_addresses[name] = address
        return True

    def execute_async_v3(self, handle):
        import torch

        if torch.cuda.is_current_stream_capturing():  # ONNX Runtime cannot be recorded: the graph does nothing
            return True
        stream = torch.cuda.ExternalStream(handle)
        with torch.cuda.stream(stream):
            read = {name: self.own_memory(name).cpu().numpy() for name in self.own_engine.own_inputs}
            names = [name for name in self.own_engine.own_tensors if name not in read]
            for name, value in zip(names, self.own_session.run(names, read)):
                self.own_memory(name).copy_(torch.from_numpy(value))
        stream.synchronize()
        if self.profiler:
            for node in self.own_engine.own_model.graph.node:
                self.profiler.report_layer_time(node.name, 0.001)
        return True

    def own_memory(self, name):
        """The tensor at an address on the GPU."""
        import torch

        kind = {'FLOAT': '<f4', 'INT32': '<i4', 'INT64': '<i8', 'HALF': '<f2'}
        described = {
            'shape': self.get_tensor_shape(name),
            'typestr': kind[self.own_engine.get_tensor_dtype(name).name],
            'data': (self.own_addresses[name], False),
            'version': 3,
        }
        return torch.as_tensor(type('Memory', (), {'__cuda_array_interface__': described})(), device='cuda')
