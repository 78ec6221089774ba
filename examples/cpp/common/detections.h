// Outputs of a model → detections.
#pragma once

#include <vector>

#include "image.h"
#include "model.h"

struct Detection {
    float x1, y1, x2, y2; // pixels
    float score;          // 0..1
    int label;            // class
};

struct Found {
    std::vector<Detection> detections; // highest score first
    int skipped = 0;                   // detections that are left out because a value is NaN or infinite
};

// Read the detections in the first image of a batch, in pixels of the letterboxed image. Layouts of the outputs:
//     plain       [B, 4 + nc, N]: x, y (centre), width, height and the scores of all classes; NMS is done here
//     DeepStream  [B, N, 6]: x1, y1, x2, y2, score and class of the best class; NMS is done here
//     end2end     num_dets [B, 1], det_boxes [B, K, 4], det_scores [B, K], det_classes [B, K]; NMS is in the file
// Of a segmentation model the boxes are read. Throws UserError for another layout.
Found read_outputs(const std::vector<Output> &outputs, float conf, float iou);

// Convert detections to pixels of the image itself, and clip their boxes to it.
void to_image(std::vector<Detection> &detections, const Letterboxed &from, const cv::Mat &image);
