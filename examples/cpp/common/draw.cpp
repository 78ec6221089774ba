#include "draw.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <opencv2/imgproc.hpp>

namespace {

// Find a place for a label: above its box, in it, below it or beside it, where no other label is; else above it.
cv::Rect place(const cv::Rect &box, cv::Size label, cv::Size image, const std::vector<cv::Rect> &taken) {
    const int left = box.x, top = box.y, right = box.br().x, bottom = box.br().y;
    const cv::Point corners[] = {{left, top - label.height},
                                 {left, top},
                                 {left, bottom},
                                 {left, bottom - label.height},
                                 {right, top},
                                 {left - label.width, top},
                                 {right - label.width, top - label.height}};
    std::vector<cv::Rect> places;
    for (const cv::Point &corner : corners)
        places.emplace_back(cv::Point(std::max(0, std::min(corner.x, image.width - label.width)),
                                      std::max(0, std::min(corner.y, image.height - label.height))),
                            label);
    const auto free = std::find_if(places.begin(), places.end(), [&](const cv::Rect &each) {
        return std::all_of(taken.begin(), taken.end(), [&](const cv::Rect &other) { return (each & other).empty(); });
    });
    return free == places.end() ? places.front() : *free;
}

cv::Scalar colour_of(int label) {
    cv::Mat colour(1, 1, CV_8UC3, cv::Scalar(static_cast<int>(label * 67LL % 180), 200, 255));
    cv::cvtColor(colour, colour, cv::COLOR_HSV2BGR);
    return cv::Scalar(colour.at<cv::Vec3b>(0));
}

} // namespace

std::string name_of(int label, const std::map<int, std::string> &names) {
    const auto found = names.find(label);
    return found == names.end() ? std::to_string(label) : found->second;
}

void draw(cv::Mat &image, const std::vector<Detection> &detections, const std::map<int, std::string> &names) {
    const int thick = std::max(1, static_cast<int>(std::lround((image.rows + image.cols) / 800.0)));
    const double size = 0.4 * thick;
    std::vector<cv::Rect> labels;
    std::vector<std::string> texts;
    for (const Detection &d : detections) {
        const cv::Rect box(cv::Point(cvRound(d.x1), cvRound(d.y1)), cv::Point(cvRound(d.x2), cvRound(d.y2)));
        cv::rectangle(image, box.tl(), box.br(), colour_of(d.label), thick);
        char score[16];
        std::snprintf(score, sizeof score, " %.2f", d.score);
        texts.push_back(name_of(d.label, names) + score);
        cv::Size label = cv::getTextSize(texts.back(), cv::FONT_HERSHEY_SIMPLEX, size, thick, nullptr);
        label.height += 4;
        labels.push_back(place(box, label, image.size(), labels));
    }
    for (std::size_t i = 0; i < labels.size(); ++i) { // above all boxes
        cv::rectangle(image, labels[i], colour_of(detections[i].label), cv::FILLED);
        cv::putText(image, texts[i], {labels[i].x, labels[i].br().y - 3}, cv::FONT_HERSHEY_SIMPLEX, size, {0, 0, 0},
                    thick, cv::LINE_AA);
    }
}
