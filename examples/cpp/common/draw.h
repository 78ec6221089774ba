// Detections → the picture.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <opencv2/core.hpp>

#include "detections.h"

// Draw detections into an image, with a colour for each class; no label hides another as long as there is room.
void draw(cv::Mat &image, const std::vector<Detection> &detections, const std::map<int, std::string> &names);

// The name of a class; its number if it has none.
std::string name_of(int label, const std::map<int, std::string> &names);
