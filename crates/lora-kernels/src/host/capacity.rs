//! How much memory the host backend may take.

use lora_weights::device::MemoryInfo;

/// Where "free" and "total" come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Capacity {
    /// The machine's memory.
    Machine,
    /// So many bytes.
    Limit(u64),
}

impl Capacity {
    /// Free and total bytes when `used` are taken.
    pub(super) fn info(self, used: u64) -> MemoryInfo {
        match self {
            Self::Limit(total) => MemoryInfo {
                free: total.saturating_sub(used),
                total,
            },
            Self::Machine => {
                let (total, available) = machine();
                // Pages not written yet are still available to the system, though they are promised.
                MemoryInfo {
                    free: available.min(total.saturating_sub(used)),
                    total,
                }
            }
        }
    }
}

/// Total and available bytes of this machine. Where it does not say, what an address space can hold: allocation itself then finds the limit.
fn machine() -> (u64, u64) {
    std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| parse_meminfo(&text))
        .unwrap_or((isize::MAX as u64, isize::MAX as u64))
}

fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let bytes = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some((bytes("MemTotal:")?, bytes("MemAvailable:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_kib() {
        let text = "MemTotal:       24576 kB\nMemFree:  1 kB\nMemAvailable:   12288 kB\n";
        assert_eq!(parse_meminfo(text), Some((24 << 20, 12 << 20)));
        assert_eq!(parse_meminfo("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn a_limit_counts_what_is_used() {
        let info = Capacity::Limit(100).info(130);
        assert_eq!((info.free, info.total), (0, 100));
        let machine = Capacity::Machine.info(0);
        assert!(machine.free > 0 && machine.free <= machine.total);
    }
}
