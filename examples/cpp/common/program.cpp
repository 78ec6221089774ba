#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <numeric>

#include <opencv2/core/utils/logger.hpp>

#include "detections.h"
#include "draw.h"
#include "image.h"
#include "text.h"

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t MOST_PIXELS = 1 << 14; // of a side

// Fill a batch with one image.
std::vector<float> repeated(const std::vector<float> &image, std::int64_t batch) {
    std::vector<float> images;
    images.reserve(image.size() * batch);
    for (std::int64_t i = 0; i < batch; ++i)
        images.insert(images.end(), image.begin(), image.end());
    return images;
}

void print_detections(const std::string &name, const std::vector<Detection> &detections, const Model &model) {
    for (const Detection &d : detections)
        std::printf("%s: %s %.3f  %.1f %.1f %.1f %.1f\n", name.c_str(), visible(name_of(d.label, model.names)).c_str(),
                    d.score, d.x1, d.y1, d.x2, d.y2);
    if (detections.empty())
        std::printf("%s: nothing found\n", name.c_str());
}

// Time runs of a model, from images in the host's memory to outputs there. Letterbox and NMS are not in it.
void print_latency(Model &model, const std::vector<float> &images, const Options &options) {
    for (int i = 0; i < options.warmup; ++i)
        model.run(images);
    std::vector<double> times; // ms
    for (int i = 0; i < options.iterations; ++i) {
        const auto start = std::chrono::steady_clock::now();
        model.run(images);
        times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    const auto percentile = [&](int p) { return times[(times.size() - 1) * p / 100]; };
    const double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
    std::printf("latency of %zu runs of batch %lld, ms: min %.3f, p50 %.3f, p90 %.3f, p95 %.3f, p99 %.3f, max %.3f, "
                "mean %.3f\n",
                times.size(), static_cast<long long>(model.batch), times.front(), percentile(50), percentile(90),
                percentile(95), percentile(99), times.back(), mean);
}

// Require an --output that can be written and is not the input itself.
void require_output(const Options &options, bool folder) {
    if (options.output.empty())
        return;
    std::error_code ignored;
    if (fs::equivalent(options.input, options.output, ignored))
        throw UserError("--output " + options.output.string() + ": is the input; give it another name");
    if (!folder && !has_image_suffix(options.output))
        throw UserError("--output " + options.output.string() +
                        ": must end in .bmp, .jpeg, .jpg, .png, .tif, .tiff or .webp");
}

std::unique_ptr<Model> opened(const Options &options, const Backend &backend) {
    std::unique_ptr<Model> model = backend.open(options.model);
    for (const std::int64_t size : {model->batch, model->height, model->width})
        if (size < 1 || size > MOST_PIXELS)
            throw UserError(options.model.string() + ": takes no images [B, 3, height, width] of a fixed size");
    return model;
}

Found found_in(Model &model, const std::vector<float> &images, const Options &options) {
    try {
        return read_outputs(model.run(images), options.conf, options.iou);
    } catch (const std::exception &e) { // the exceptions of the libraries share no other base class
        throw UserError(options.model.string() + ": cannot be run: " + one_line(e.what()));
    }
}

int detect(const Options &options, const Backend &backend) {
    const bool folder = fs::is_directory(options.input);
    require_output(options, folder);
    const std::vector<fs::path> files = images_in(options.input);
    const std::unique_ptr<Model> model = opened(options, backend);
    std::size_t total = 0, read = 0;
    int skipped = 0;
    std::vector<float> first;
    for (const fs::path &file : files) {
        const fs::path name = folder ? file.lexically_relative(options.input) : file.filename();
        cv::Mat image = read_image(file);
        if (image.empty()) {
            if (!folder)
                throw UserError(file.string() + ": OpenCV cannot read it");
            std::fflush(stdout);
            std::fprintf(stderr, "%s: OpenCV cannot read it\n", visible(file.string()).c_str());
            continue;
        }
        ++read;
        const Letterboxed fitted = letterbox(image, static_cast<int>(model->height), static_cast<int>(model->width));
        std::vector<float> images = repeated(fitted.pixels, model->batch);
        Found found = found_in(*model, images, options);
        to_image(found.detections, fitted, image);
        print_detections(visible(name.string()), found.detections, *model);
        total += found.detections.size();
        skipped += found.skipped;
        if (!options.output.empty()) {
            draw(image, found.detections, model->names);
            write_image(image, folder ? options.output / name : options.output);
        }
        if (first.empty())
            first = std::move(images);
    }
    if (!read)
        throw UserError(options.input.string() + ": OpenCV can read none of its images");
    const std::string broken = skipped ? " (" + std::to_string(skipped) + " more left out: NaN or infinite)" : "";
    const std::string pictures = options.output.empty() ? "" : ", saved: " + visible(options.output.string());
    std::printf("%zu detections%s in %zu images%s\n", total, broken.c_str(), read, pictures.c_str());
    if (options.iterations)
        print_latency(*model, first, options);
    return read == files.size() ? 0 : 2;
}

} // namespace

int run_program(int argc, char **argv, const Backend &backend) {
    const std::string program = visible(fs::path(argc ? argv[0] : "yolov9").filename().string());
    std::string message;
    try {
        cv::utils::logging::setLogLevel(cv::utils::logging::LOG_LEVEL_SILENT);
        const Options options = parse_options(argc, argv, backend.suffix);
        int code = 0;
        if (options.help)
            std::printf("%s", usage(program, backend.what).c_str());
        else
            code = detect(options, backend);
        if (std::fflush(stdout))
            throw UserError("the output could not be written");
        return code;
    } catch (const std::exception &e) { // UserError, and what no one foresaw: memory, a folder that cannot be read
        message = e.what();
    } catch (...) {
        message = "an exception of no known kind";
    }
    std::fflush(stdout);
    std::fprintf(stderr, "%s: error: %s\n", program.c_str(), visible(message).c_str());
    return 2;
}
