#include "text.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>

namespace {

// Decode the UTF-8 character at `at`, and set `length` to its bytes. Returns -1 for bytes that are no UTF-8.
long decode(const std::string &text, std::size_t at, std::size_t &length) {
    const unsigned char first = text[at];
    length = 1;
    if (first < 0x80)
        return first;
    const std::size_t more = first >= 0xF0 && first < 0xF5 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first >= 0xF5 || at + more >= text.size())
        return -1;
    long code = first & (0x3F >> more);
    for (std::size_t i = 1; i <= more; ++i) {
        const unsigned char next = text[at + i];
        if ((next & 0xC0) != 0x80)
            return -1;
        code = code << 6 | (next & 0x3F);
    }
    const long least[] = {0, 0x80, 0x800, 0x10000};
    if (code < least[more] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000))
        return -1;
    length = more + 1;
    return code;
}

// Controls, and the characters that turn the direction of text or have no width.
bool printable(long code) {
    return code >= 0x20 && !(code >= 0x7F && code < 0xA1) && code != 0xAD && !(code >= 0x200B && code <= 0x200F) &&
           !(code >= 0x2028 && code <= 0x202E) && !(code >= 0x2060 && code <= 0x206F) && code != 0xFEFF;
}

void append_utf8(std::string &text, unsigned long code) {
    if (code < 0x80) {
        text += static_cast<char>(code);
        return;
    }
    const int more = code >= 0x10000 ? 3 : code >= 0x800 ? 2 : 1;
    const unsigned char lead[] = {0, 0xC0, 0xE0, 0xF0};
    text += static_cast<char>(lead[more] | code >> 6 * more);
    for (int i = more - 1; i >= 0; --i)
        text += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
}

// Reader of a Python dictionary or list of texts.
class Names {
  public:
    explicit Names(const std::string &text) : text_(text) {}

    std::map<int, std::string> read() {
        std::map<int, std::string> names;
        const bool keyed = take('{');
        if (!keyed)
            need('[');
        const char end = keyed ? '}' : ']';
        while (!take(end)) {
            int key = static_cast<int>(names.size());
            if (keyed) {
                key = number();
                need(':');
            }
            names[key] = quoted();
            if (!take(',')) {
                need(end);
                break;
            }
        }
        skip_spaces();
        if (at_ != text_.size())
            fail();
        return names;
    }

  private:
    [[noreturn]] static void fail() { throw UserError("the names of the classes are damaged; export the file again"); }

    void skip_spaces() {
        while (at_ < text_.size() && text_[at_] == ' ')
            ++at_;
    }

    bool take(char wanted) {
        skip_spaces();
        const bool found = at_ < text_.size() && text_[at_] == wanted;
        at_ += found;
        return found;
    }

    void need(char wanted) {
        if (!take(wanted))
            fail();
    }

    char next() {
        if (at_ >= text_.size())
            fail();
        return text_[at_++];
    }

    int number() {
        skip_spaces();
        int value = 0, digits = 0;
        for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) && digits < 9; ++digits)
            value = value * 10 + (text_[at_++] - '0');
        if (!digits)
            fail();
        return value;
    }

    std::string quoted() {
        skip_spaces();
        const char quote = next();
        if (quote != '\'' && quote != '"')
            fail();
        std::string value;
        for (char c = next(); c != quote; c = next())
            if (c == '\\')
                escape(value);
            else
                value += c;
        return value;
    }

    void escape(std::string &value) {
        const char kind = next();
        const int digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
        if (!digits) {
            value += kind == 'n' ? '\n' : kind == 't' ? '\t' : kind == 'r' ? '\r' : kind;
            return;
        }
        std::string hex;
        for (int i = 0; i < digits; ++i)
            if (!std::isxdigit(static_cast<unsigned char>(hex += next(), hex.back())))
                fail();
        const unsigned long code = std::strtoul(hex.c_str(), nullptr, 16);
        if (code > 0x10FFFF)
            fail();
        append_utf8(value, code);
    }

    const std::string &text_;
    std::size_t at_ = 0;
};

} // namespace

std::string visible(const std::string &text) {
    std::string shown;
    for (std::size_t at = 0, length = 0; at < text.size(); at += length) {
        const long code = decode(text, at, length);
        if (code >= 0 && printable(code)) {
            shown.append(text, at, length);
            continue;
        }
        char escaped[16];
        const long value = code < 0 ? static_cast<unsigned char>(text[at]) : code;
        std::snprintf(escaped, sizeof escaped, value == '\n' ? "\\n" : value < 0x100 ? "\\x%02lx" : "\\u%04lx", value);
        shown += escaped;
    }
    return shown;
}

std::string one_line(const std::string &message) {
    std::string line;
    for (const char c : message)
        if (!std::isspace(static_cast<unsigned char>(c)))
            line += c;
        else if (!line.empty() && line.back() != ' ')
            line += ' ';
    while (!line.empty() && line.back() == ' ')
        line.pop_back();
    return line.substr(0, 200);
}

std::map<int, std::string> parse_names(const std::string &text) {
    return text.empty() ? std::map<int, std::string>{} : Names(text).read();
}
