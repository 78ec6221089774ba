// Images: files, and the tensor that a model takes.
#pragma once

#include <filesystem>
#include <vector>

#include <opencv2/core.hpp>

// An image that is fitted into the size of a model. A point (x, y) of the image is at (x * gain + left, y * gain +
// top).
struct Letterboxed {
    std::vector<float> pixels; // RGB [3, height, width] in 0..1
    float gain, left, top;
};

// Whether a name ends as one of an image that the programs read and write.
bool has_image_suffix(const std::filesystem::path &path);

// All images in a folder and in its folders, sorted; or the one image that `path` names. Throws UserError if there is
// none.
std::vector<std::filesystem::path> images_in(const std::filesystem::path &path);

// Read an image as BGR uint8. An empty one is returned if OpenCV cannot read it.
cv::Mat read_image(const std::filesystem::path &path);

// Fit an image into height x width, with its sides in proportion and equal grey borders.
Letterboxed letterbox(const cv::Mat &image, int height, int width);

// Write an image under a hidden name and rename it, so that no picture is incomplete. Throws UserError.
void write_image(const cv::Mat &image, const std::filesystem::path &path);
