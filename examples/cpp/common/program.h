// The whole program around a model: command line → images → detections, pictures and latency.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "model.h"
#include "options.h"

// What one program adds to the common part.
struct Backend {
    std::string what;                                                          // of the kind of file, for --help
    std::string suffix;                                                        // of the file
    std::function<std::unique_ptr<Model>(const std::filesystem::path &)> open; // throws UserError
};

// Run the program. Returns the exit code: 2 with one line on stderr after bad input, else 0.
int run_program(int argc, char **argv, const Backend &backend);
