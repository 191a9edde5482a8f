// The rows of a token to where they stay: as many small copies as there are heads, in one call.
#include "put.hpp"

#include <cstring>

namespace kvant {

void put(const kvant_put_request &r) {
    for (int64_t i = 0; i < r.sides; i++) {
        const kvant_put_side &side = r.side[i];
        for (int64_t b = 0; b < r.batch; b++)
            for (int64_t h = 0; h < r.heads; h++) {
                const char *from = (const char *)side.rows.data + b * side.rows.batch + h * side.rows.head;
                char *to = (char *)side.room + b * side.batch + h * side.head + r.slot * side.bytes;
                // Not memcpy: rows may be some of those that the room holds.
                for (int64_t n = 0; n < r.count; n++)
                    std::memmove(to + n * side.bytes, from + n * side.rows.row, (size_t)side.bytes);
            }
    }
}

}  // namespace kvant
