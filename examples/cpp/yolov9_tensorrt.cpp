// Detect objects in images with a TensorRT engine: MODEL.engine, as scripts/generate_trt_engine.sh or trtexec builds
// it.
//
// Class names come from MODEL.engine.json, if this file exists. One run - images to the GPU, the engine, outputs back -
// is captured as a CUDA graph and launched as a whole. For TensorRT 8.6 to 11 and CUDA 11.4 or later.
#include <cstring>
#include <fstream>
#include <iterator>

#include <NvInferPlugin.h>
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <nlohmann/json.hpp>
#include <nvtx3/nvToolsExt.h>

#include "common/program.h"
#include "common/text.h"

namespace {

namespace trt = nvinfer1;

const char *const AGAIN = "; build it again here: scripts/generate_trt_engine.sh";

void check(cudaError_t error) {
    if (error != cudaSuccess)
        throw UserError(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Errors of TensorRT are kept for the one line to the user, its warnings are not shown.
class Logger : public trt::ILogger {
  public:
    void log(Severity severity, const char *message) noexcept override {
        if (severity <= Severity::kERROR && first.empty())
            try {
                first = message;
            } catch (...) { // no memory: the message is lost, not the program
            }
    }

    std::string first; // error
};

// An owner of what CUDA and TensorRT made, which knows how to release it.
template <typename T, auto Release>
struct Releaser {
    void operator()(T *owned) const { Release(owned); }
};
template <typename T, auto Release>
using Owned = std::unique_ptr<T, Releaser<T, Release>>;

using DeviceMemory = Owned<void, cudaFree>;
using PinnedMemory = Owned<void, cudaFreeHost>;
using Stream = Owned<std::remove_pointer_t<cudaStream_t>, cudaStreamDestroy>;
using Graph = Owned<std::remove_pointer_t<cudaGraph_t>, cudaGraphDestroy>;
using LaunchableGraph = Owned<std::remove_pointer_t<cudaGraphExec_t>, cudaGraphExecDestroy>;

// A range with a name in the timeline of Nsight Systems.
struct Range {
    explicit Range(const char *name) { nvtxRangePushA(name); }
    Range(const Range &) = delete;
    Range &operator=(const Range &) = delete;
    ~Range() { nvtxRangePop(); }
};

// An input or output of the engine, with its memory on both sides.
struct Binding {
    std::string name;
    bool input = false;
    trt::DataType type{};
    std::vector<std::int64_t> shape;
    std::size_t count = 1, bytes = 0;
    DeviceMemory device;
    PinnedMemory host;
    std::vector<float> floats; // of an output of integers
};

std::size_t bytes_of(trt::DataType type) {
    if (type == trt::DataType::kFLOAT || type == trt::DataType::kINT32)
        return 4;
    if (static_cast<int>(type) == 8) // kINT64, which TensorRT 8.6 has not
        return 8;
    throw UserError("an input or output is neither FP32 nor an integer");
}

std::vector<char> content_of(const std::filesystem::path &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Read the names of the classes from the sidecar, and require an engine that is whole and of this TensorRT and GPU.
std::map<int, std::string> read_sidecar(const std::filesystem::path &engine, std::size_t bytes) {
    const std::filesystem::path path = engine.string() + ".json";
    if (!std::filesystem::exists(path))
        return {};
    try {
        const nlohmann::json sidecar = nlohmann::json::parse(content_of(path));
        const int version = getInferLibVersion();
        const int thousand = version >= 10000 ? 100 : 10; // 8.6.1 is 8601, 10.13.3 is 101303
        const std::string here = "TensorRT " + std::to_string(version / (thousand * 100)) + "." +
                                 std::to_string(version / 100 % thousand) + "." + std::to_string(version % 100);
        if (sidecar.at("bytes").get<std::size_t>() != bytes)
            throw UserError("not whole, or not the engine that its .json tells of" + std::string(AGAIN));
        if (sidecar.at("built_by").get<std::string>() != here)
            throw UserError("built by " + sidecar.at("built_by").get<std::string>() + ", and this is " + here + AGAIN);
        if (sidecar.at("gpu").is_object()) {
            cudaDeviceProp gpu{};
            check(cudaGetDeviceProperties(&gpu, 0));
            const std::string name = sidecar.at("gpu").at("name").get<std::string>();
            if (name != gpu.name)
                throw UserError("built on " + name + ", and this is " + gpu.name + AGAIN);
        }
        return parse_names(sidecar.at("metadata").value("names", ""));
    } catch (const nlohmann::json::exception &e) {
        throw UserError("its .json is damaged (" + one_line(e.what()) + "); delete it, or" + (AGAIN + 1));
    }
}

class EngineModel : public Model {
  public:
    explicit EngineModel(const std::filesystem::path &path) {
        int gpus = 0;
        if (cudaGetDeviceCount(&gpus) != cudaSuccess || !gpus)
            throw UserError("needs an NVIDIA GPU, and CUDA finds none here");
        const std::vector<char> content = content_of(path);
        names = read_sidecar(path, content.size());
        initLibNvInferPlugins(&logger_, ""); // NMS inside the engine may be a plugin
        runtime_.reset(trt::createInferRuntime(logger_));
        engine_.reset(runtime_ ? runtime_->deserializeCudaEngine(content.data(), content.size()) : nullptr);
        context_.reset(engine_ ? engine_->createExecutionContext() : nullptr);
        if (!context_)
            throw UserError("TensorRT cannot load it; an engine runs only with the version that built it, on the same "
                            "kind of GPU: " +
                            one_line(logger_.first));
        stream_ = made<Stream>(cudaStreamCreate);
        set_input();
        for (int i = 0; i < engine_->getNbIOTensors(); ++i)
            bind(engine_->getIOTensorName(i));
        enqueue(); // TensorRT allocates in the first run, which a capture forbids
        check(cudaStreamSynchronize(stream_.get()));
        capture();
    }

    std::vector<Output> run(const std::vector<float> &images) override {
        const Range range("run");
        for (const Binding &each : bindings_)
            if (each.input)
                std::memcpy(each.host.get(), images.data(), each.bytes);
        if (graph_)
            check(cudaGraphLaunch(graph_.get(), stream_.get()));
        else
            enqueue();
        check(cudaStreamSynchronize(stream_.get()));
        std::vector<Output> outputs;
        for (Binding &each : bindings_)
            if (!each.input)
                outputs.push_back({each.name, each.shape, floats(each)});
        return outputs;
    }

  private:
    template <typename T, typename Make>
    static T made(Make make) {
        typename T::pointer handle = nullptr;
        check(make(&handle));
        return T(handle);
    }

    // Choose the shape of the one input: of open axes the smallest that the engine was built for.
    void set_input() {
        const char *input = nullptr;
        for (int i = 0; i < engine_->getNbIOTensors(); ++i) {
            const char *name = engine_->getIOTensorName(i);
            if (engine_->getTensorIOMode(name) != trt::TensorIOMode::kINPUT)
                continue;
            if (input)
                throw UserError("has several inputs");
            input = name;
        }
        trt::Dims shape = input ? engine_->getTensorShape(input) : trt::Dims{};
        for (int i = 0; i < shape.nbDims; ++i)
            if (shape.d[i] < 0) {
                shape = engine_->getProfileShape(input, 0, trt::OptProfileSelector::kMIN);
                break;
            }
        if (shape.nbDims != 4 || shape.d[1] != 3 || engine_->getTensorDataType(input) != trt::DataType::kFLOAT)
            throw UserError("takes no images FP32 [B, 3, height, width]");
        if (!context_->setInputShape(input, shape))
            throw UserError("TensorRT refuses the shape of its input: " + one_line(logger_.first));
        batch = shape.d[0], height = shape.d[2], width = shape.d[3];
    }

    // Give an input or output its memory.
    void bind(const char *name) {
        Binding binding;
        binding.name = name;
        binding.input = engine_->getTensorIOMode(name) == trt::TensorIOMode::kINPUT;
        binding.type = engine_->getTensorDataType(name);
        const trt::Dims shape = context_->getTensorShape(name);
        for (int i = 0; i < shape.nbDims; ++i) {
            if (shape.d[i] < 1)
                throw UserError(std::string("the size of ") + name + " is not known before a run");
            binding.shape.push_back(shape.d[i]);
            binding.count *= shape.d[i];
        }
        binding.bytes = binding.count * bytes_of(binding.type);
        binding.device = made<DeviceMemory>([&](void **memory) { return cudaMalloc(memory, binding.bytes); });
        binding.host = made<PinnedMemory>([&](void **memory) { return cudaMallocHost(memory, binding.bytes); });
        std::memset(binding.host.get(), 0, binding.bytes);
        if (!context_->setTensorAddress(name, binding.device.get()))
            throw UserError(std::string("TensorRT refuses the memory of ") + name + ": " + one_line(logger_.first));
        bindings_.push_back(std::move(binding));
    }

    // Put one run into the stream.
    void enqueue() {
        for (const Binding &each : bindings_)
            if (each.input)
                check(cudaMemcpyAsync(each.device.get(), each.host.get(), each.bytes, cudaMemcpyHostToDevice,
                                      stream_.get()));
        if (!context_->enqueueV3(stream_.get()))
            throw UserError("TensorRT: the engine did not run: " + one_line(logger_.first));
        for (const Binding &each : bindings_)
            if (!each.input)
                check(cudaMemcpyAsync(each.host.get(), each.device.get(), each.bytes, cudaMemcpyDeviceToHost,
                                      stream_.get()));
    }

    // Record one run as a CUDA graph. Some engines allow none, such as those with a loop: these run without one.
    void capture() {
        check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
        bool whole = true;
        try {
            enqueue();
        } catch (const UserError &) {
            whole = false;
        }
        cudaGraph_t recorded = nullptr;
        whole = cudaStreamEndCapture(stream_.get(), &recorded) == cudaSuccess && whole;
        const Graph graph(recorded);
        if (whole)
            graph_ = made<LaunchableGraph>(
                [&](cudaGraphExec_t *made) { return cudaGraphInstantiateWithFlags(made, graph.get(), 0); });
        else
            std::fprintf(stderr, "note: this engine cannot be captured as a CUDA graph, and runs without one\n");
        cudaGetLastError(); // the error of a capture stays until it is read
    }

    static const float *floats(Binding &output) {
        if (output.type == trt::DataType::kFLOAT)
            return static_cast<const float *>(output.host.get());
        if (output.type == trt::DataType::kINT32)
            convert<std::int32_t>(output);
        else
            convert<std::int64_t>(output);
        return output.floats.data();
    }

    template <typename T>
    static void convert(Binding &output) {
        const T *values = static_cast<const T *>(output.host.get());
        output.floats.assign(values, values + output.count);
    }

    // in this order: each needs the ones above it
    Logger logger_;
    std::unique_ptr<trt::IRuntime> runtime_;
    std::unique_ptr<trt::ICudaEngine> engine_;
    std::unique_ptr<trt::IExecutionContext> context_;
    Stream stream_;
    std::vector<Binding> bindings_;
    LaunchableGraph graph_;
};

std::unique_ptr<Model> open_model(const std::filesystem::path &path) {
    try {
        return std::make_unique<EngineModel>(path);
    } catch (const std::exception &e) {
        throw UserError(path.string() + ": " + e.what());
    }
}

} // namespace

int main(int argc, char **argv) {
    return run_program(argc, argv, {"a TensorRT engine, MODEL.engine", ".engine", open_model});
}
