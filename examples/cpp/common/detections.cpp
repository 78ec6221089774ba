#include "detections.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "text.h"

namespace {

constexpr std::size_t MOST = 300; // detections in an image
constexpr float MOST_CLASSES = 1e6F;

struct Candidate {
    Detection detection;
    std::int64_t place; // of its box in the output
};

[[noreturn]] void unknown_layout() {
    throw UserError("its outputs are of none of the layouts of export_qat.py: plain, DeepStream or end2end");
}

// Detections with a score above `conf`.
class Candidates {
  public:
    explicit Candidates(float conf) : conf_(conf) {}

    // Keep a detection that was asked for; count it if a value is NaN or infinite.
    void offer(const std::array<float, 4> &box, float score, float label, std::int64_t place) {
        if (score <= conf_)
            return;
        const bool finite = std::all_of(box.begin(), box.end(), [](float side) { return std::isfinite(side); });
        if (finite && std::isfinite(score) && std::fabs(label) < MOST_CLASSES) // a NaN is not below it
            kept.push_back({{box[0], box[1], box[2], box[3], score, static_cast<int>(label)}, place});
        else
            ++skipped;
    }

    std::vector<Candidate> kept;
    int skipped = 0;

  private:
    float conf_;
};

float overlap(const Detection &a, const Detection &b) {
    const float width = std::max(0.0F, std::min(a.x2, b.x2) - std::max(a.x1, b.x1));
    const float height = std::max(0.0F, std::min(a.y2, b.y2) - std::max(a.y1, b.y1));
    const float shared = width * height;
    return shared / ((a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1) - shared);
}

// Drop each box that overlaps a better box of its class.
std::vector<Detection> nms(std::vector<Candidate> candidates, float iou) {
    std::sort(candidates.begin(), candidates.end(), [](const Candidate &a, const Candidate &b) {
        if (a.detection.score != b.detection.score)
            return a.detection.score > b.detection.score;
        return a.place != b.place ? a.place < b.place : a.detection.label < b.detection.label;
    });
    std::vector<Detection> kept;
    for (auto best = candidates.begin(); best != candidates.end() && kept.size() < MOST; ++best) {
        const bool stays = std::all_of(kept.begin(), kept.end(), [&](const Detection &better) {
            return better.label != best->detection.label || overlap(better, best->detection) <= iou;
        });
        if (stays)
            kept.push_back(best->detection);
    }
    return kept;
}

const Output *named(const std::vector<Output> &outputs, const std::string &name) {
    const auto found = std::find_if(outputs.begin(), outputs.end(), [&](const Output &o) { return o.name == name; });
    return found == outputs.end() ? nullptr : &*found;
}

Found read_end2end(const std::vector<Output> &outputs, float conf) {
    const Output *number = named(outputs, "num_dets"), *boxes = named(outputs, "det_boxes"),
                 *scores = named(outputs, "det_scores"), *labels = named(outputs, "det_classes");
    if (!boxes || !scores || !labels || number->shape.empty() || boxes->shape.size() != 3 || boxes->shape[2] != 4 ||
        scores->shape.size() < 2 || scores->shape[1] != boxes->shape[1] || labels->shape != scores->shape)
        unknown_layout();
    Candidates candidates(conf);
    for (std::int64_t i = 0; i < boxes->shape[1] && static_cast<float>(i) < number->values[0]; ++i) {
        const float *box = boxes->values + 4 * i;
        candidates.offer({box[0], box[1], box[2], box[3]}, scores->values[i], labels->values[i], i);
    }
    Found found{{}, candidates.skipped};
    for (const Candidate &each : candidates.kept)
        found.detections.push_back(each.detection);
    return found;
}

} // namespace

Found read_outputs(const std::vector<Output> &outputs, float conf, float iou) {
    if (named(outputs, "num_dets"))
        return read_end2end(outputs, conf);
    const Output *predictions = nullptr;
    std::int64_t coefficients = 0; // of the masks, behind the scores
    for (const Output &each : outputs)
        if (each.shape.size() == 3 && !predictions)
            predictions = &each;
        else if (each.shape.size() == 4 && !coefficients)
            coefficients = each.shape[1];
        else
            unknown_layout();
    if (!predictions)
        unknown_layout();
    const std::int64_t rows = predictions->shape[1], columns = predictions->shape[2];
    const float *values = predictions->values;
    Candidates candidates(conf);
    if (columns == 6) { // DeepStream
        for (std::int64_t i = 0; i < rows; ++i, values += 6)
            candidates.offer({values[0], values[1], values[2], values[3]}, values[4], values[5], i);
    } else {
        const std::int64_t classes = rows - coefficients - 4;
        if (classes < 1)
            unknown_layout();
        for (std::int64_t label = 0; label < classes; ++label) // a box may have several classes
            for (std::int64_t i = 0; i < columns; ++i) {
                const float score = values[(4 + label) * columns + i];
                if (score <= conf)
                    continue;
                const float x = values[i], y = values[columns + i];
                const float w = values[2 * columns + i] / 2, h = values[3 * columns + i] / 2;
                candidates.offer({x - w, y - h, x + w, y + h}, score, static_cast<float>(label), i);
            }
    }
    return {nms(std::move(candidates.kept), iou), candidates.skipped};
}

void to_image(std::vector<Detection> &detections, const Letterboxed &from, const cv::Mat &image) {
    const auto native = [&](float value, float border, int most) {
        return std::clamp((value - border) / from.gain, 0.0F, static_cast<float>(most));
    };
    for (Detection &d : detections) {
        d.x1 = native(d.x1, from.left, image.cols);
        d.y1 = native(d.y1, from.top, image.rows);
        d.x2 = native(d.x2, from.left, image.cols);
        d.y2 = native(d.y2, from.top, image.rows);
    }
}
