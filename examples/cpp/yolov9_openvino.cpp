// Detect objects in images with OpenVINO, on the CPU: MODEL.xml and MODEL.bin, as export_qat.py --include openvino or
// openvino_end2end writes them.
#include <openvino/openvino.hpp>

#include "common/program.h"
#include "common/text.h"

namespace {

class OpenVinoModel : public Model {
  public:
    explicit OpenVinoModel(const std::filesystem::path &path) {
        const std::shared_ptr<ov::Model> model = core_.read_model(path.string());
        if (model->inputs().size() != 1)
            throw UserError("has several inputs");
        ov::PartialShape shape = model->input().get_partial_shape();
        if (shape.rank() != 4 || shape[1] != 3)
            throw UserError("takes no images [B, 3, height, width]");
        if (shape[0].is_dynamic()) { // an open batch takes one image
            shape[0] = 1;
            model->reshape(shape);
        }
        const ov::Shape size = shape.to_shape(); // throws if a side is open
        batch = static_cast<std::int64_t>(size[0]);
        height = static_cast<std::int64_t>(size[2]);
        width = static_cast<std::int64_t>(size[3]);
        if (model->has_rt_info("framework", "names"))
            names = parse_names(model->get_rt_info<std::string>("framework", "names"));
        // FP32 for all that is not INT8: by default a CPU with BF16 computes in BF16
        compiled_ = core_.compile_model(model, "CPU", ov::hint::performance_mode(ov::hint::PerformanceMode::LATENCY),
                                        ov::hint::inference_precision(ov::element::f32));
        request_ = compiled_.create_infer_request();
        integers_.resize(compiled_.outputs().size());
    }

    std::vector<Output> run(const std::vector<float> &images) override {
        // OpenVINO only reads it
        request_.set_input_tensor(
            ov::Tensor(ov::element::f32, compiled_.input().get_shape(), const_cast<float *>(images.data())));
        request_.infer();
        std::vector<Output> outputs;
        for (std::size_t i = 0; i < integers_.size(); ++i) {
            const ov::Tensor tensor = request_.get_output_tensor(i);
            const ov::Shape shape = tensor.get_shape();
            const auto &names = compiled_.output(i).get_names();
            outputs.push_back(
                {names.empty() ? "" : *names.begin(), {shape.begin(), shape.end()}, floats(tensor, integers_[i])});
        }
        return outputs;
    }

  private:
    static const float *floats(const ov::Tensor &tensor, std::vector<float> &store) {
        if (tensor.get_element_type() == ov::element::f32)
            return tensor.data<const float>();
        if (tensor.get_element_type() == ov::element::i32)
            store.assign(tensor.data<const std::int32_t>(), tensor.data<const std::int32_t>() + tensor.get_size());
        else if (tensor.get_element_type() == ov::element::i64)
            store.assign(tensor.data<const std::int64_t>(), tensor.data<const std::int64_t>() + tensor.get_size());
        else
            throw UserError("an output is neither FP32 nor an integer");
        return store.data();
    }

    ov::Core core_; // first: what follows must not outlive it
    ov::CompiledModel compiled_;
    ov::InferRequest request_;
    std::vector<std::vector<float>> integers_; // outputs of integers, as floats
};

std::unique_ptr<Model> open_model(const std::filesystem::path &path) {
    try {
        return std::make_unique<OpenVinoModel>(path);
    } catch (const std::exception &e) {
        throw UserError(path.string() + ": OpenVINO cannot load it, or it is no detector: " + one_line(e.what()));
    }
}

} // namespace

int main(int argc, char **argv) {
    return run_program(argc, argv, {"an OpenVINO model, MODEL.xml", ".xml", open_model});
}
