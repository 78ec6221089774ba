// Text from the command line and from files: shown in one line, and read as the names of classes.
#pragma once

#include <map>
#include <stdexcept>
#include <string>

// A mistake of the user, or a file that cannot be used. The program ends with this line and exit code 2.
struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Escape the characters that are not printable: they could move the cursor or colour the terminal.
std::string visible(const std::string &text);

// Join the lines of a library's message, and cut it to 200 bytes.
std::string one_line(const std::string &message);

// Read the names of the classes as the export writes them: {0: 'person', 1: 'car'} or ['person', 'car'], as Python
// shows a dictionary or a list. An empty text has no names. Throws UserError.
std::map<int, std::string> parse_names(const std::string &text);
