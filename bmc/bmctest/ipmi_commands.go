package bmctest

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/bougou/go-ipmi/pkg/handlers"
	"github.com/bougou/go-ipmi/pkg/types"
)

// commandLog writes down every IPMI command that came inside a session.
type commandLog struct {
	mu   sync.Mutex
	list []string
}

// Commands are the IPMI commands so far, such as "00.01 Get Chassis Status":
// network function and command in hex, and the specification's name.
func (i *IPMI) Commands() []string {
	i.commands.mu.Lock()
	defer i.commands.mu.Unlock()
	return slices.Clone(i.commands.list)
}

// watch is a middleware of the embedded BMC.
func (c *commandLog) watch(next handlers.Handler) handlers.Handler {
	return handlers.HandlerFunc(func(ctx context.Context, h *handlers.HandlerContext, data []byte) ([]byte, types.CompletionCode, error) {
		c.mu.Lock()
		c.list = append(c.list, fmt.Sprintf("%02x.%02x %s", uint8(h.Command.NetFn), h.Command.ID, h.Command.Name))
		c.mu.Unlock()
		return next.Handle(ctx, h, data)
	})
}
