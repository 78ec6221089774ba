// Silence of libraries that write to stderr about what they also report as an error.
#pragma once

#include <cstdio>
#include <fcntl.h>
#include <unistd.h>

// While it lives, what anyone writes to stderr is lost.
class Quiet {
  public:
    Quiet() : stderr_(dup(STDERR_FILENO)) {
        std::fflush(stderr);
        const int nowhere = open("/dev/null", O_WRONLY);
        if (stderr_ >= 0 && nowhere >= 0)
            dup2(nowhere, STDERR_FILENO);
        if (nowhere >= 0)
            close(nowhere);
    }
    Quiet(const Quiet &) = delete;
    Quiet &operator=(const Quiet &) = delete;
    ~Quiet() {
        std::fflush(stderr);
        if (stderr_ >= 0) {
            dup2(stderr_, STDERR_FILENO);
            close(stderr_);
        }
    }

  private:
    int stderr_;
};
