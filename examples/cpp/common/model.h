// A model in the library that runs it: each program has one subclass.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// A tensor that a model returned. An integer tensor comes as floats.
struct Output {
    std::string name; // empty if the file has no names of outputs
    std::vector<std::int64_t> shape;
    const float *values; // valid until the next run
};

class Model {
  public:
    virtual ~Model() = default;

    // Run the model on FP32 [batch, 3, height, width], RGB in 0..1.
    virtual std::vector<Output> run(const std::vector<float> &images) = 0;

    std::int64_t batch = 0, height = 0, width = 0;
    std::map<int, std::string> names; // class → name
};
