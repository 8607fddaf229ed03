// SPDX-License-Identifier: Apache-2.0
//
// takt.hpp: takt.h for C++17, with ownership and exceptions. Header only; link with libtakt.
//
//     takt::Node node;
//     takt::Lane lane = node.attach("go1_walk", takt::Wait::hybrid);
//     lane.input<float>("obs")[0] = 1.0f;
//     takt_reply reply = lane.infer();
//     if (reply.status == TAKT_OK)
//         act(lane.output<float>("action"));
//
// What takt.h says about slots, threads and fork holds here too. Detach lanes before their node goes, or let them go in
// any order: a lane that outlives its node has ended, but its memory is still there.
#ifndef TAKT_HPP
#define TAKT_HPP

#include <takt.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace takt
{

// A negative errno of takt.h with the sentence that goes with it. code() is positive.
class Error : public std::runtime_error
{
      public:
	Error(int code, const std::string &what) : std::runtime_error(what), code_(code < 0 ? -code : code)
	{
	}
	int code() const noexcept
	{
		return code_;
	}

      private:
	int code_;
};

enum class Wait : std::uint32_t { block = TAKT_WAIT_BLOCK, spin = TAKT_WAIT_SPIN, hybrid = TAKT_WAIT_HYBRID };
enum class Kind : std::uint32_t { any = TAKT_KIND_ANY, loop = TAKT_KIND_LOOP, model = TAKT_KIND_MODEL };

// The elements of one tensor, contiguous in shared memory.
template <typename T> class Span
{
      public:
	Span(T *data, std::size_t size) noexcept : data_(data), size_(size)
	{
	}
	T *data() const noexcept
	{
		return data_;
	}
	std::size_t size() const noexcept
	{
		return size_;
	}
	T *begin() const noexcept
	{
		return data_;
	}
	T *end() const noexcept
	{
		return data_ + size_;
	}
	T &operator[](std::size_t i) const noexcept
	{
		return data_[i];
	}

      private:
	T *data_;
	std::size_t size_;
};

namespace detail
{

template <typename T> constexpr std::uint32_t dtype_of()
{
	static_assert(std::is_arithmetic<T>::value, "a plain number type; use Lane::input_tensor() for others");
	if (std::is_same<T, bool>::value)
		return TAKT_BOOL;
	if (std::is_floating_point<T>::value)
		return sizeof(T) == 4 ? TAKT_FP32 : TAKT_FP64;
	switch (sizeof(T)) {
	case 1:
		return std::is_signed<T>::value ? TAKT_INT8 : TAKT_UINT8;
	case 2:
		return std::is_signed<T>::value ? TAKT_INT16 : TAKT_UINT16;
	case 4:
		return std::is_signed<T>::value ? TAKT_INT32 : TAKT_UINT32;
	default:
		return std::is_signed<T>::value ? TAKT_INT64 : TAKT_UINT64;
	}
}

} // namespace detail

class Lane
{
      public:
	Lane(Lane &&other) noexcept : lane_(std::exchange(other.lane_, nullptr))
	{
	}
	Lane &operator=(Lane &&other) noexcept
	{
		std::swap(lane_, other.lane_);
		return *this;
	}
	Lane(const Lane &) = delete;
	Lane &operator=(const Lane &) = delete;
	~Lane()
	{
		takt_detach(lane_);
	}

	takt_lane *get() const noexcept
	{
		return lane_;
	}

	takt_lane_info info() const
	{
		takt_lane_info info;
		takt_describe(lane_, &info);
		return info;
	}

	takt_tensor input_tensor(const char *name)
	{
		takt_tensor tensor;
		check(takt_input(lane_, name, &tensor));
		return tensor;
	}

	takt_tensor output_tensor(const char *name)
	{
		takt_tensor tensor;
		check(takt_output(lane_, name, &tensor));
		return tensor;
	}

	// The next free slot's input as numbers of type T, which must be the tensor's own.
	template <typename T> Span<T> input(const char *name)
	{
		return span<T>(input_tensor(name));
	}

	// The last reply's output.
	template <typename T> Span<const T> output(const char *name)
	{
		return span<const T>(output_tensor(name));
	}

	// Whether it comes back by itself after its end, which is told once (Error with code EPIPE); see takt_set_reattach().
	void reattach(bool on)
	{
		check(takt_set_reattach(lane_, on));
	}

	void set_shape(const char *name, std::initializer_list<std::int64_t> dims)
	{
		check(takt_set_shape(lane_, name, dims.begin(), static_cast<std::uint32_t>(dims.size())));
	}

	std::uint64_t submit(std::uint64_t deadline_ns = 0)
	{
		const std::int64_t sequence = takt_submit(lane_, deadline_ns);
		check(sequence < 0 ? static_cast<int>(sequence) : 0);
		return static_cast<std::uint64_t>(sequence);
	}

	// The last inputs once more, as old as they are; see takt_repeat().
	std::uint64_t repeat()
	{
		const std::int64_t sequence = takt_repeat(lane_);
		check(sequence < 0 ? static_cast<int>(sequence) : 0);
		return static_cast<std::uint64_t>(sequence);
	}

	takt_reply wait(std::uint64_t sequence)
	{
		takt_reply reply;
		check(takt_wait(lane_, sequence, TAKT_TIMEOUT_DEFAULT, &reply));
		return reply;
	}

	takt_reply wait(std::uint64_t sequence, std::chrono::nanoseconds timeout)
	{
		takt_reply reply;
		check(takt_wait(lane_, sequence, timeout.count(), &reply));
		return reply;
	}

	takt_reply infer(std::uint64_t deadline_ns = 0)
	{
		takt_reply reply;
		check(takt_infer(lane_, deadline_ns, TAKT_TIMEOUT_DEFAULT, &reply));
		return reply;
	}

	takt_reply infer(std::uint64_t deadline_ns, std::chrono::nanoseconds timeout)
	{
		takt_reply reply;
		check(takt_infer(lane_, deadline_ns, timeout.count(), &reply));
		return reply;
	}

	void cancel(std::uint64_t sequence)
	{
		check(takt_cancel(lane_, sequence));
	}

	int fileno()
	{
		const int fd = takt_fileno(lane_);
		check(fd);
		return fd;
	}

      private:
	friend class Node;
	explicit Lane(takt_lane *lane) noexcept : lane_(lane)
	{
	}

	void check(int result) const
	{
		if (result < 0)
			throw Error(result, takt_lane_error(lane_));
	}

	template <typename T> static Span<T> span(const takt_tensor &tensor)
	{
		using Element = typename std::remove_const<T>::type;
		constexpr std::uint32_t dtype = detail::dtype_of<Element>();
		if (tensor.dtype != dtype)
			throw Error(invalid_argument, std::string("tensor ") + tensor.name + " holds " +
							  takt_dtype_name(tensor.dtype) + ", asked for " +
							  takt_dtype_name(dtype));
		return Span<T>(static_cast<T *>(tensor.data), static_cast<std::size_t>(tensor.bytes) / sizeof(T));
	}

	static constexpr int invalid_argument = 22; // EINVAL

	takt_lane *lane_;
};

class Node
{
      public:
	// Connects as takt_connect() does; an empty path looks in the usual places.
	explicit Node(const std::string &path = "", std::chrono::nanoseconds timeout = std::chrono::nanoseconds(0))
	{
		const int result = takt_connect(&node_, path.empty() ? nullptr : path.c_str(), timeout.count());
		if (result < 0) {
			const Error error(result, takt_error(node_));
			takt_close(node_);
			throw error;
		}
	}
	Node(Node &&other) noexcept : node_(std::exchange(other.node_, nullptr))
	{
	}
	Node &operator=(Node &&other) noexcept
	{
		std::swap(node_, other.node_);
		return *this;
	}
	Node(const Node &) = delete;
	Node &operator=(const Node &) = delete;
	~Node()
	{
		takt_close(node_);
	}

	takt_node *get() const noexcept
	{
		return node_;
	}

	Lane attach(const std::string &name, Wait wait = Wait::hybrid, Kind kind = Kind::any,
		    std::chrono::nanoseconds timeout = std::chrono::seconds(5))
	{
		takt_lane *lane = nullptr;
		const int result = takt_attach(node_, name.c_str(), static_cast<std::uint32_t>(kind),
					       static_cast<std::uint32_t>(wait), timeout.count(), &lane);
		if (result < 0)
			throw Error(result, takt_error(node_));
		return Lane(lane);
	}

	std::string name() const
	{
		return takt_node_name(node_);
	}

      private:
	takt_node *node_ = nullptr;
};

} // namespace takt

#endif
