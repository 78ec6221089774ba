#include "options.h"

#include <cerrno>
#include <cstdlib>

#include "text.h"

namespace fs = std::filesystem;

namespace {

constexpr int MOST_RUNS = 1000000;

int to_int(const std::string &flag, const std::string &text, int least) {
    char *end = nullptr;
    errno = 0;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end || errno || value < least || value > MOST_RUNS)
        throw UserError(flag + " " + text + ": must be a whole number from " + std::to_string(least) + " to " +
                        std::to_string(MOST_RUNS));
    return static_cast<int>(value);
}

float to_fraction(const std::string &flag, const std::string &text) {
    char *end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end || !(value >= 0 && value <= 1)) // NaN is none either
        throw UserError(flag + " " + text + ": must lie in 0 to 1");
    return static_cast<float>(value);
}

} // namespace

Options parse_options(int argc, char **argv, const std::string &suffix) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        std::string flag = argv[i], value;
        if (flag == "-h" || flag == "--help") {
            options.help = true;
            return options;
        }
        const auto equals = flag.find('=');
        const bool known = [&, name = flag.substr(0, equals)] {
            for (const char *each :
                 {"--model", "--input", "--output", "--benchmark-iterations", "--warmup", "--conf", "--iou"})
                if (name == each)
                    return true;
            return false;
        }();
        if (!known)
            throw UserError(flag + ": no such option; see --help");
        if (equals != std::string::npos) {
            value = flag.substr(equals + 1);
            flag.resize(equals);
        } else if (++i < argc) {
            value = argv[i];
        } else {
            throw UserError(flag + ": needs a value; see --help");
        }
        if (flag == "--model")
            options.model = value;
        else if (flag == "--input")
            options.input = value;
        else if (flag == "--output")
            options.output = value;
        else if (flag == "--benchmark-iterations")
            options.iterations = to_int(flag, value, 0);
        else if (flag == "--warmup")
            options.warmup = to_int(flag, value, 0);
        else if (flag == "--conf")
            options.conf = to_fraction(flag, value);
        else
            options.iou = to_fraction(flag, value);
    }
    if (options.model.empty() || options.input.empty())
        throw UserError(std::string(options.model.empty() ? "--model" : "--input") + " is missing; see --help");
    std::error_code ignored;
    if (options.model.extension() != suffix || !fs::is_regular_file(options.model, ignored))
        throw UserError(options.model.string() + ": expected a file ending in " + suffix);
    if (!fs::exists(options.input, ignored))
        throw UserError(options.input.string() + ": no such image or folder");
    return options;
}

std::string usage(const std::string &program, const std::string &what) {
    return "usage: " + program + " --model FILE --input IMAGE|FOLDER [options]\n\n" + "Detect objects in images with " +
           what + ".\n\n" + "  --model FILE              " + what + "\n" +
           "  --input IMAGE|FOLDER      an image, or a folder: all images in it and in its folders\n"
           "  --output FILE|FOLDER      save the image with its detections; of a folder a folder of pictures\n"
           "  --benchmark-iterations N  time N runs on the first image (0)\n"
           "  --warmup N                runs before the timed ones (10)\n"
           "  --conf X                  lowest score, 0 to 1 (0.25); a file with NMS inside has one of its own "
           "besides\n"
           "  --iou X                   IoU above which NMS drops a box, 0 to 1 (0.45); not of a file with NMS inside\n"
           "  -h, --help                this text\n";
}
