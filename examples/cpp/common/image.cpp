#include "image.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <unistd.h>

#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>

#include "quiet.h"
#include "text.h"

namespace fs = std::filesystem;

bool has_image_suffix(const fs::path &path) {
    std::string suffix = path.extension().string();
    std::transform(suffix.begin(), suffix.end(), suffix.begin(), [](unsigned char c) { return std::tolower(c); });
    for (const char *each : {".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
        if (suffix == each)
            return true;
    return false;
}

std::vector<fs::path> images_in(const fs::path &path) {
    std::vector<fs::path> files;
    if (!fs::is_directory(path))
        return {path};
    for (const auto &entry : fs::recursive_directory_iterator(path))
        if (entry.is_regular_file() && has_image_suffix(entry.path()))
            files.push_back(entry.path());
    if (files.empty())
        throw UserError(path.string() + ": a folder without images (.bmp, .jpeg, .jpg, .png, .tif, .tiff, .webp)");
    std::sort(files.begin(), files.end());
    return files;
}

cv::Mat read_image(const fs::path &path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<unsigned char> bytes{std::istreambuf_iterator<char>(file), {}};
    const Quiet quiet; // about files that are cut
    try {
        return bytes.empty() ? cv::Mat() : cv::imdecode(bytes, cv::IMREAD_COLOR);
    } catch (const cv::Exception &) { // too many pixels for OpenCV
        return {};
    }
}

Letterboxed letterbox(const cv::Mat &image, int height, int width) {
    double gain = std::min(static_cast<double>(height) / image.rows, static_cast<double>(width) / image.cols);
    cv::Mat fitted = image;
    if (gain != 1) {
        const cv::Size size(std::max(1, static_cast<int>(image.cols * gain)),
                            std::max(1, static_cast<int>(image.rows * gain)));
        cv::resize(image, fitted, size, 0, 0, gain < 1 ? cv::INTER_AREA : cv::INTER_LINEAR);
    }
    const double top = (height - fitted.rows) / 2.0, left = (width - fitted.cols) / 2.0;
    gain = static_cast<double>(fitted.rows) / image.rows; // after the rounding
    const auto rounded = [](double value) { return static_cast<int>(std::lround(value)); };
    cv::Mat framed; // if a border is odd, right and bottom get one pixel more
    cv::copyMakeBorder(fitted, framed, rounded(top - 0.1), rounded(top + 0.1), rounded(left - 0.1), rounded(left + 0.1),
                       cv::BORDER_CONSTANT, cv::Scalar(114, 114, 114));

    cv::Mat fractions(1, 256, CV_32F), scaled;
    for (int i = 0; i < 256; ++i)
        fractions.at<float>(i) = static_cast<float>(i) / 255.0F;
    cv::LUT(framed, fractions, scaled);
    const std::size_t plane = static_cast<std::size_t>(height) * width;
    Letterboxed result{std::vector<float>(3 * plane), static_cast<float>(gain), static_cast<float>(left),
                       static_cast<float>(top)};
    for (int c = 0; c < 3; ++c) { // BGR → RGB, [H, W, 3] → [3, H, W]
        cv::Mat channel(height, width, CV_32F, result.pixels.data() + (2 - c) * plane);
        cv::extractChannel(scaled, channel, c);
    }
    return result;
}

void write_image(const cv::Mat &image, const fs::path &path) {
    std::vector<unsigned char> content;
    bool encoded = false;
    try {
        encoded = has_image_suffix(path) && cv::imencode(path.extension().string(), image, content);
    } catch (const cv::Exception &) { // too many pixels for the format
    }
    if (!encoded)
        throw UserError(path.string() + ": OpenCV writes no such picture");
    std::error_code problem;
    if (path.has_parent_path())
        fs::create_directories(path.parent_path(), problem);
    const fs::path hidden = path.parent_path() / ("." + std::to_string(getpid()) + ".tmp");
    std::ofstream file(hidden, std::ios::binary);
    file.write(reinterpret_cast<const char *>(content.data()), static_cast<std::streamsize>(content.size()));
    file.close();
    if (file)
        fs::rename(hidden, path, problem);
    if (!file || problem) {
        std::error_code ignored;
        fs::remove(hidden, ignored);
        throw UserError(path.string() + ": could not be written" + (problem ? " (" + problem.message() + ")" : ""));
    }
}
