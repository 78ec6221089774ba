// The command line of the programs.
#pragma once

#include <filesystem>
#include <string>

struct Options {
    std::filesystem::path model;
    std::filesystem::path input;  // an image, or a folder of images
    std::filesystem::path output; // the picture, or the folder of the pictures; empty: none are saved
    int iterations = 0;           // timed runs
    int warmup = 10;              // runs before them
    float conf = 0.25F;
    float iou = 0.45F;
    bool help = false; // nothing else was read
};

// Read the command line. `suffix` is the suffix of the model, such as ".xml". Throws UserError.
Options parse_options(int argc, char **argv, const std::string &suffix);

// The text of --help. `what` names the kind of file, such as "an OpenVINO model (MODEL.xml)".
std::string usage(const std::string &program, const std::string &what);
