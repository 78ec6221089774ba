// Detect objects in images with a package of AOTInductor: MODEL.pt2, as export_qat.py --include aoti writes it.
//
// A package is a program: it is compiled for one kind of CPU or GPU and one version of torch, and what is in it runs.
// Its metadata is read and checked before. Open only packages that you trust.
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include "common/program.h"
#include "common/quiet.h"
#include "common/text.h"

namespace {

using Metadata = std::unordered_map<std::string, std::string>;
using Loader = torch::inductor::AOTIModelPackageLoader;

const char *const AGAIN = "; export it here with export_qat.py --include aoti";

std::string value(const Metadata &metadata, const std::string &key) {
    const auto found = metadata.find(key);
    if (found == metadata.end())
        throw UserError("its metadata has no " + key);
    return found->second;
}

// The first line of a message of torch; the others are its own calls.
std::string first_line(const std::string &message) { return one_line(message.substr(0, message.find('\n'))); }

// The version of torch without the name of its build: 2.15.0 of 2.15.0+cu132.
std::string public_version(const std::string &version) { return version.substr(0, version.find('+')); }

// The instructions of this CPU in Linux's words, such as avx2 and avx512_vnni.
std::set<std::string> cpu_flags() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) {
            std::istringstream words(line.substr(line.find(':') + 1));
            return {std::istream_iterator<std::string>(words), {}};
        }
    return {};
}

// Require a package for this machine and this torch.
void require_fit(const Metadata &metadata) {
    const std::string torch = value(metadata, "torch"), device = value(metadata, "device");
    if (public_version(torch) != public_version(TORCH_VERSION))
        throw UserError("compiled by torch " + torch + ", and this is torch " + TORCH_VERSION);
    if (device != "cpu" && device != "cuda")
        throw UserError("compiled for the device " + device + ", which this program does not know");
    if (device == "cuda" && !at::hasCUDA())
        throw UserError("compiled for an NVIDIA GPU, and torch finds none here");
    if (device == "cuda")
        return;
    const std::set<std::string> here = cpu_flags();
    std::istringstream wanted(value(metadata, "cpu"));
    for (std::string flag; wanted >> flag;)
        if (!here.count(flag))
            throw UserError("compiled for another CPU, with " + flag);
}

// Read whole numbers with commas between them, such as the 640,640 of imgsz.
std::vector<std::int64_t> numbers(const std::string &text) {
    std::vector<std::int64_t> result;
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');)
        if (!part.empty() && part.size() < 6 && part.find_first_not_of("0123456789") == std::string::npos)
            result.push_back(std::stoll(part));
    return result;
}

// A folder for what torch unpacks. It leaves its own behind if a package cannot be loaded.
class TemporaryFolder {
  public:
    TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "yolov9_aoti.XXXXXX").string()) {
        if (!mkdtemp(path_.data()) || setenv("TMPDIR", path_.c_str(), 1))
            throw UserError(path_ +
                            ": no temporary folder can be made, into which the package is unpacked; set TMPDIR");
    }
    TemporaryFolder(const TemporaryFolder &) = delete;
    TemporaryFolder &operator=(const TemporaryFolder &) = delete;
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

  private:
    std::string path_;
};

class AotiModel : public Model {
  public:
    explicit AotiModel(const std::string &path) {
        const Metadata metadata = Loader::load_metadata_from_package(path, "model");
        require_fit(metadata);
        const std::vector<std::int64_t> imgsz = numbers(value(metadata, "imgsz")),
                                        images = numbers(value(metadata, "batch"));
        if (imgsz.size() != 2)
            throw UserError("its metadata imgsz names no height and width");
        height = imgsz[0], width = imgsz[1];
        batch = images.size() == 1 ? images[0] : 1; // an open batch takes one image
        names = parse_names(value(metadata, "names"));
        if (value(metadata, "device") == "cuda")
            device_ = at::Device(at::kCUDA, 0);
        const Quiet quiet;
        loader_ = std::make_unique<Loader>(path);
        try_run();
    }

    std::vector<Output> run(const std::vector<float> &images) override {
        const c10::InferenceMode mode;
        // torch only reads it
        const at::Tensor input = at::from_blob(const_cast<float *>(images.data()), {batch, 3, height, width});
        returned_ = loader_->run({input.to(device_)});
        std::vector<Output> outputs;
        for (at::Tensor &each : returned_) {
            each = each.to(at::kCPU, at::kFloat).contiguous();
            outputs.push_back({"", each.sizes().vec(), each.data_ptr<float>()});
        }
        return outputs;
    }

  private:
    // Run once, with the check of the input's shape that a package has and by default leaves out.
    void try_run() {
        setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
        try {
            run(std::vector<float>(batch * 3 * height * width));
        } catch (const std::exception &e) {
            throw UserError("cannot be run here, on images of its imgsz: " + first_line(e.what()));
        }
    }

    TemporaryFolder folder_;
    at::Device device_ = at::kCPU;
    std::unique_ptr<Loader> loader_;
    std::vector<at::Tensor> returned_; // outputs of the last run
};

std::unique_ptr<Model> open_model(const std::filesystem::path &path) {
    try {
        return std::make_unique<AotiModel>(path.string());
    } catch (const UserError &e) {
        throw UserError(path.string() + ": " + e.what() + AGAIN);
    } catch (const std::exception &e) {
        const std::string reason = e.what();
        throw UserError(path.string() + ": no package of AOTInductor, or damaged: " +
                        one_line(reason.substr(0, reason.find('\n'))) + AGAIN);
    }
}

} // namespace

int main(int argc, char **argv) {
    return run_program(argc, argv, {"a package of AOTInductor, MODEL.pt2", ".pt2", open_model});
}
